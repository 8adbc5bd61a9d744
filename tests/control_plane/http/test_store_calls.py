"""Calls that wait for the object store: as many at once as there are threads for them, and the rest not for ever."""

from __future__ import annotations

import threading

import anyio
import pytest
from starlette.requests import Request

from control_plane.http.store_calls import STORE_CALLS, StoreCalls
from ft_assets.errors import Unavailable


def test_a_call_that_finds_no_thread_in_time_is_refused_and_those_that_began_are_not_cut_off() -> None:
    answers, done = threading.Event(), list[str]()

    def hang(what: str) -> str:
        assert answers.wait(30)
        return what

    async def call(calls: StoreCalls, what: str) -> None:
        done.append(await calls.run(hang, what))

    async def main() -> None:
        calls = StoreCalls(anyio.CapacityLimiter(STORE_CALLS), Request({"type": "http"}))
        async with anyio.create_task_group() as others:
            for _ in range(STORE_CALLS):
                others.start_soon(call, calls, "began")
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(Unavailable, match=r"has not answered 8 calls for 0\.3 s"):
                await calls.run(hang, "late", wait_s=0.3)
            answers.set()
        assert await calls.run(hang, "again") == "again"

    anyio.run(main)
    assert done == ["began"] * STORE_CALLS
