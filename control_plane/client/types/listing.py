# Written by `python -m tools.client` from the API's OpenAPI document: change that, and run it again.
"""Objects of the API: listing."""

from __future__ import annotations

from typing import Any, Generic, Literal, NotRequired, TypedDict, TypeVar

T = TypeVar("T")


class Deleted(TypedDict):
    id: str
    object: str
    deleted: NotRequired[bool]


class ListOf(TypedDict, Generic[T]):
    """One page of a list."""

    object: Literal["list"]
    data: list[T]
    has_more: bool


Json = dict[str, Any]
"""An object whose fields depend on what it tells of."""
