"""Operators' commands are called as tenants' are."""

from tests.ft_client.cli.conftest import ft, ft_env, offline

__all__ = ["ft", "ft_env", "offline"]
