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
    """Always `true`: a request that could not delete the object is refused with an error instead."""


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


class ListOf(TypedDict, Generic[T]):
    """One page of a list."""

    object: Literal["list"]
    data: list[T]
    has_more: bool


Json = dict[str, Any]
"""An object whose fields depend on what it tells of."""
