"""Paginated lists."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from control_plane.client.types import ListOf

if TYPE_CHECKING:
    from control_plane.client.asynchronous.connection import AsyncConnection

T = TypeVar("T")


class AsyncPages(Generic[T]):
    """The objects of a list, over all of its pages; requested only when read.

    Iterate over it for all objects, over :meth:`pages` for whole pages, or call :meth:`take` for a few.
    """

    def __init__(self, connection: AsyncConnection, path: str, params: Mapping[str, Any]) -> None:
        self._connection, self._path, self._params = connection, path, dict(params)

    async def pages(self) -> AsyncIterator[ListOf[T]]:
        """Yields whole pages, each a list with ``data`` and ``has_more``."""
        params = dict(self._params)
        while True:
            page: ListOf[T] = await self._connection.call(ListOf, "GET", self._path, params=params)
            yield page
            if not page.get("has_more") or not page["data"]:
                return
            last: Any = page["data"][-1]
            params["after"] = last["id"]

    async def __aiter__(self) -> AsyncIterator[T]:
        async for page in self.pages():
            for item in page["data"]:
                yield item

    async def page(self) -> ListOf[T]:
        """Returns the first page."""
        return await self._connection.call(ListOf, "GET", self._path, params=self._params)

    async def take(self, num_items: int) -> list[T]:
        """Returns the first so many, or fewer if there are no more."""
        found: list[T] = []
        if num_items <= 0:
            return found
        async for item in self:
            found.append(item)
            if len(found) >= num_items:
                break
        return found

    async def all(self) -> list[T]:
        """Returns every object."""
        found: list[T] = []
        async for item in self:
            found.append(item)
        return found
