"""What every noun shares: lists and deletions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Literal, TypeVar

from pydantic import BaseModel

T = TypeVar("T")


class Deleted(BaseModel):
    id: str
    object: str
    deleted: bool = True


class ListOf(BaseModel, Generic[T]):
    object: Literal["list"] = "list"
    data: Sequence[T]
    has_more: bool = False
