"""The one body of every refusal."""

from __future__ import annotations

from pydantic import ConfigDict

from control_plane.http.schemas import ApiModel


class ErrorDetail(ApiModel):
    """What went wrong and what to do about it."""

    model_config = ConfigDict(extra="forbid")

    message: str
    """Explanation for people, with the offending value, the limit and the next step."""
    type: str
    """Kind of error: `invalid_request_error`, `authentication_error`, `permission_error`, `insufficient_quota`, `rate_limit_error` or
    `server_error`."""
    param: str | None
    """Name of the parameter or field that caused the error; null if no single one did."""
    code: str | None
    """Stable, machine-readable error code, documented in docs/errors.md."""


class Error(ApiModel):
    """Body of every error response."""

    model_config = ConfigDict(extra="forbid")

    error: ErrorDetail
    """What went wrong."""
