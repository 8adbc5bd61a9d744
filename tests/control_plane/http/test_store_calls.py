"""Calls that wait for the object store: as many at once as there are threads for them, and the rest not for ever."""

from __future__ import annotations

import threading

import anyio
import pytest
from starlette.requests import Request

from control_plane.http.rate_limits import TenantLimiter
from control_plane.http.store_calls import STORE_CALLS, STORE_CALLS_OF_ONE, StoreCalls
from control_plane.http.turns import Turn
from core.errors import Unavailable


def limiter_of_process() -> TenantLimiter:
    return TenantLimiter(total=STORE_CALLS, each=STORE_CALLS_OF_ONE, wait_s=60.0)


def calls_of(limiter: TenantLimiter, caller: str) -> StoreCalls:
    return StoreCalls(limiter, Request({"type": "http", "state": {"turn": Turn(limiter, limiter, caller)}}))


def test_calls_of_one_tenant_leave_threads_for_those_of_others() -> None:
    answers, began = threading.Event(), list[str]()

    def hang(caller: str) -> None:
        began.append(caller)
        assert answers.wait(30)

    async def main() -> None:
        limiter = limiter_of_process()
        async with anyio.create_task_group() as others:
            for _ in range(2 * STORE_CALLS):
                others.start_soon(calls_of(limiter, "loud").run, hang, "loud")
            await anyio.wait_all_tasks_blocked()
            assert await calls_of(limiter, "quiet").run(lambda: "answered", wait_s=5.0) == "answered"
            assert began == ["loud"] * STORE_CALLS_OF_ONE
            answers.set()

    anyio.run(main)
    assert began == ["loud"] * 2 * STORE_CALLS


def test_a_call_that_finds_no_thread_in_time_is_refused_and_those_that_began_are_not_cut_off() -> None:
    answers, done = threading.Event(), list[str]()

    def hang(what: str) -> str:
        assert answers.wait(30)
        return what

    async def call(calls: StoreCalls, what: str) -> None:
        done.append(await calls.run(hang, what))

    async def main() -> None:
        limiter = limiter_of_process()
        calls = calls_of(limiter, "late")
        async with anyio.create_task_group() as others:
            for n in range(STORE_CALLS):
                others.start_soon(call, calls_of(limiter, f"t{n // STORE_CALLS_OF_ONE}"), "began")
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(Unavailable, match=r"has not answered 8 calls for 0\.3 s"):
                await calls.run(hang, "late", wait_s=0.3)
            answers.set()
        assert await calls.run(hang, "again") == "again"

    anyio.run(main)
    assert done == ["began"] * STORE_CALLS
