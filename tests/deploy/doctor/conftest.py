"""``ft admin doctor`` is called as other commands are."""

from tests.ft_client.cli.conftest import ft_env, offline

__all__ = ["ft_env", "offline"]
