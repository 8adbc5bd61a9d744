"""Work that takes long: no tenant has all of its threads, and whoever gets none is told so."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import pytest

from control_plane.http.rate_limits import JoinLimiter, TenantLimiter
from core.errors import FtError, RateLimited, Unavailable

PATIENCE_S = 20.0


class Work:
    """What goes on until `done` is set, and counts who is at it."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.at_it: list[str] = []

    def __call__(self, name: str) -> str:
        self.at_it.append(name)
        assert self.done.wait(PATIENCE_S)
        return name

    async def until(self, num: int) -> None:
        with anyio.fail_after(PATIENCE_S):
            while len(self.at_it) < num:
                await anyio.sleep(0.01)


async def refusal(call: Callable[[], Any]) -> FtError:
    with pytest.raises(FtError) as refused:
        await call()
    return refused.value


def test_a_tenant_has_its_share_and_leaves_the_others_theirs() -> None:
    async def scenario() -> None:
        turns, work = TenantLimiter(total=3, each=2, wait_s=0.05), Work()
        async with anyio.create_task_group() as group:
            for name in ("a1", "a2"):
                group.start_soon(turns.run, "a", partial(work, name))
            await work.until(2)
            error = await refusal(lambda: turns.run("a", lambda: work("a3")))
            assert (type(error), error.code, error.http_status) == (RateLimited, "uploads_busy", 429)
            group.start_soon(turns.run, "b", lambda: work("b1"))
            await work.until(3)
            error = await refusal(lambda: turns.run("c", lambda: work("c1")))
            assert (type(error), error.code, error.http_status) == (Unavailable, "uploads_busy", 503)
            work.done.set()
        assert await turns.run("a", lambda: work("a4")) == "a4"
        assert sorted(work.at_it) == ["a1", "a2", "a4", "b1"]

    anyio.run(scenario)


def test_a_place_that_comes_as_the_wait_ends_does_not_blame_the_other_tenants() -> None:
    async def scenario() -> None:
        turns, ends = TenantLimiter(total=9, each=1, wait_s=0.05), asyncio.Event()

        async def hold() -> None:
            async with turns.turn("a"):
                await ends.wait()

        async def wait() -> FtError | None:
            try:
                async with turns.turn("a"):
                    return None
            except FtError as error:
                return error

        holder = asyncio.create_task(hold())
        await asyncio.sleep(0)
        waiter = asyncio.create_task(wait())
        await asyncio.sleep(0.01)
        ends.set()  # its place is released in the loop's next round, and the wait's time is over in the same one
        time.sleep(0.1)
        await holder
        assert isinstance(await waiter, RateLimited)

    asyncio.run(scenario())


def test_who_waits_long_enough_has_a_turn() -> None:
    async def scenario() -> None:
        turns, work = TenantLimiter(total=2, each=1, wait_s=PATIENCE_S), Work()
        async with anyio.create_task_group() as group:
            group.start_soon(turns.run, "a", lambda: work("first"))
            group.start_soon(turns.run, "a", lambda: work("second"))
            await work.until(1)
            work.done.set()
        assert len(work.at_it) == 2

    anyio.run(scenario)


def test_an_upload_has_one_that_joins_and_one_that_waits_and_a_tenant_two_uploads() -> None:
    async def scenario() -> None:
        joins, work = JoinLimiter(total=5, each=2), Work()
        async with anyio.create_task_group() as group:
            for upload in ("u1", "u1", "u2"):
                group.start_soon(joins.run, "a", upload, lambda: work("a"))
            await work.until(3)
            for upload in ("u1", "u3"):
                assert (await refusal(lambda upload=upload: joins.run("a", upload, lambda: work("never")))).code == "upload_completing"  # type: ignore[misc]
            for upload in ("u4", "u5"):
                group.start_soon(joins.run, "b", upload, lambda: work("b"))
            await work.until(5)
            assert (await refusal(lambda: joins.run("c", "u6", lambda: work("never")))).code == "upload_completing"
            work.done.set()
        assert await joins.run("a", "u3", lambda: work("later")) == "later"
        assert "never" not in work.at_it

    anyio.run(scenario)
