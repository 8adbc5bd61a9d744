# Written by `python -m tools.client` from the API's OpenAPI document: change that, and run it again.
"""Objects of the API: http."""

from __future__ import annotations

from typing import Any, Generic, Literal, NotRequired, TypedDict, TypeVar

T = TypeVar("T")


class Deleted(TypedDict):
    """Confirmation that an object was deleted."""

    id: str
    """Id or name of the deleted object."""
    object: str
    """Type of the deleted object."""
    deleted: NotRequired[bool]
    """Always `true`, since a request that cannot delete the object is refused."""


class Error(TypedDict):
    """Body of every error response."""

    error: ErrorDetail
    """What went wrong."""


class ErrorDetail(TypedDict):
    """What went wrong and what to do about it."""

    message: str
    """Human-readable explanation with the offending value, the limit and the next step."""
    type: str
    """Kind of error: `invalid_request_error`, `authentication_error`, `permission_error`, `insufficient_quota`, `rate_limit_error`
    or `server_error`."""
    param: str | None
    """Name of the parameter or field that caused the error; null if no single one did."""
    code: str | None
    """Stable, machine-readable error code, documented in docs/errors.md."""


class ListOf(TypedDict, Generic[T]):
    """One page of a list."""

    object: Literal["list"]
    data: list[T]
    has_more: bool


Json = dict[str, Any]
"""An object whose fields depend on what it tells of."""
