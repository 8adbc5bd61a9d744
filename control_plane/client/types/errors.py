# Written by `python -m tools.client` from the API's OpenAPI document: change that, and run it again.
"""Objects of the API: errors."""

from __future__ import annotations

from typing import TypedDict


class Error(TypedDict):
    error: ErrorDetail


class ErrorDetail(TypedDict):
    message: str
    """With the value, the limit and the next step."""
    type: str
    """invalid_request_error, authentication_error, permission_error, insufficient_quota, rate_limit_error or server_error."""
    param: str | None
    """The field that the refusal is about."""
    code: str | None
    """Stable; docs/errors.md lists them all."""
