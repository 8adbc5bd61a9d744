"""Limits on long-running work in dedicated threads: each tenant has a share of them and cannot use them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio
import anyio.to_thread

from ft_assets.errors import Unavailable

_T = TypeVar("_T")


class Turns:
    """Run at most so many at once, and so many per tenant; a wait longer than `wait_s` is refused with ``uploads_busy``.

    Per process, on the event loop that created it.
    """

    def __init__(self, *, total: int, each: int, wait_s: float) -> None:
        self._total, self._each, self._wait_s = anyio.CapacityLimiter(total), each, wait_s
        self._threads = anyio.CapacityLimiter(total)
        self._of: dict[str, anyio.CapacityLimiter] = {}
        self._users: Counter[str] = Counter()

    async def run(self, tenant: str, work: Callable[[], _T]) -> _T:
        """Run `work` in a thread when it is the tenant's turn; returns its result."""
        async with self._turn(tenant):
            return await anyio.to_thread.run_sync(work, limiter=self._threads)

    @asynccontextmanager
    async def _turn(self, tenant: str) -> AsyncIterator[None]:
        share = self._of.setdefault(tenant, anyio.CapacityLimiter(self._each))
        self._users[tenant] += 1
        me = object()
        held: list[anyio.CapacityLimiter] = []
        try:
            with anyio.move_on_after(self._wait_s) as waiting:
                for limiter in (share, self._total):
                    await limiter.acquire_on_behalf_of(me)
                    held.append(limiter)
            if waiting.cancelled_caught:
                raise Unavailable(
                    f"no turn to store the body came within {self._wait_s:g} s; {self._each} bodies of a tenant are stored at once, and "
                    f"{self._total.total_tokens:g} of all: send fewer at once, and this one again",
                    code="uploads_busy",
                )
            yield
        finally:
            for limiter in held:
                limiter.release_on_behalf_of(me)
            self._users[tenant] -= 1
            if not self._users[tenant]:
                del self._users[tenant], self._of[tenant]


class Joins:
    """Joins of uploads: at most `each` uploads per tenant at once, and for each of them one call that joins and one that waits.

    Further calls are refused at once with ``upload_completing``: waiting is up to the client, and costs no thread.
    """

    def __init__(self, *, total: int, each: int) -> None:
        self._total, self._each = total, each
        self._threads = anyio.CapacityLimiter(total)
        self._calls: dict[str, Counter[str]] = {}

    async def run(self, tenant: str, upload_id: str, join: Callable[[], _T]) -> _T:
        """Run `join` in a thread; there is no await between counting and starting, so the counts are exact."""
        mine = self._calls.get(tenant, Counter())
        if mine[upload_id] >= 2:
            raise Unavailable(f"upload {upload_id} is being completed by other calls; send this one again", code="upload_completing")
        if (upload_id not in mine and len(mine) >= self._each) or sum(c.total() for c in self._calls.values()) >= self._total:
            raise Unavailable(
                f"{len(mine)} of your uploads are being completed (limit {self._each} per tenant, {self._total} in all); "
                f"send this one for {upload_id} again",
                code="upload_completing",
            )
        self._calls[tenant] = mine
        mine[upload_id] += 1
        try:
            return await anyio.to_thread.run_sync(join, limiter=self._threads)
        finally:
            mine[upload_id] -= 1
            mine += Counter()  # drops tenants at 0
            if not mine:
                del self._calls[tenant]
