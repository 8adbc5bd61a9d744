"""Paginated lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ft_client.record import Record, frame

if TYPE_CHECKING:
    import pandas

    from ft_client.connection import Connection


T = TypeVar("T")


class Page(Record, Generic[T]):
    """One page of a list."""

    data: list[T]
    has_more: bool


class Pages(Generic[T]):
    """The objects of a list, over all of its pages; requested only when read.

    Iterate over it for all objects, over :meth:`pages` for whole pages, or call :meth:`take` for a few.
    """

    def __init__(self, connection: Connection, path: str, params: Mapping[str, Any]) -> None:
        self._connection, self._path, self._params = connection, path, dict(params)

    def pages(self) -> Iterator[Page[T]]:
        """Yields whole pages, each with ``data`` and ``has_more``."""
        params = dict(self._params)
        while True:
            page: Page[T] = self._connection.call("GET", self._path, params=params)
            yield page
            if not page.get("has_more") or not page["data"]:
                return
            params["after"] = page["data"][-1]["id"]

    def __iter__(self) -> Iterator[T]:
        for page in self.pages():
            yield from page["data"]

    def page(self) -> Page[T]:
        """Returns the first page."""
        return next(self.pages())

    def take(self, num_items: int) -> list[T]:
        """Returns the first so many, or fewer if there are no more."""
        return list(islice(self, max(0, num_items)))

    def all(self) -> list[T]:
        """Returns every object."""
        return list(self)

    def frame(self) -> pandas.DataFrame:
        """Returns every object as a pandas frame, one row each; fields of nested objects become columns."""
        return frame(self)
