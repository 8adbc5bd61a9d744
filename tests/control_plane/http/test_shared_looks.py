"""Many streams of one job ask the database as one does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import anyio

from control_plane.http.streams import MAX_LOOKING, MAX_LOOKING_OF_TENANT, POLL_S, News, OpenStreams


class Looks:
    """What was asked, and how it is answered."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.fails = 0
        self._lock = threading.Lock()

    def of(self, subject: str) -> Callable[[], News]:
        def look() -> News:
            with self._lock:
                self.asked.append(subject)
                failing, self.fails = self.fails > 0, self.fails - 1
            time.sleep(0.05)
            if failing:
                raise OSError("the database is away")
            return [(len(self.asked), subject)], False

        return look


def test_streams_that_ask_the_same_share_one_look() -> None:
    streams, looks, found = OpenStreams(), Looks(), []

    async def test() -> None:
        async def one(key: tuple[str, str, int]) -> None:
            found.append((key, await streams.look(key[0], key[1:], looks.of(key[1]))))

        async with anyio.create_task_group() as tasks:
            for key in (*[("acme", "job", 7)] * 20, ("acme", "job", 8), ("acme", "other", 7), ("globex", "job", 7)):
                tasks.start_soon(one, key)

    anyio.run(test)
    assert sorted(looks.asked) == ["job", "job", "job", "other"], "other tenants, jobs and places in a job look themselves"
    assert len({str(news) for key, news in found if key == ("acme", "job", 7)}) == 1
    assert len(found) == 23


def test_a_look_is_repeated_when_the_time_of_a_poll_has_passed() -> None:
    streams, looks = OpenStreams(), Looks()

    async def test() -> None:
        for _ in range(2):
            await streams.look("acme", "job", looks.of("job"))
        await anyio.sleep(POLL_S)
        await streams.look("acme", "job", looks.of("job"))

    anyio.run(test)
    assert looks.asked == ["job", "job"]


def test_a_look_that_failed_is_not_shared() -> None:
    streams, looks, found = OpenStreams(), Looks(), []
    looks.fails = 1

    async def test() -> None:
        async def one() -> None:
            try:
                found.append(await streams.look("acme", "job", looks.of("job")))
            except OSError as error:
                found.append(error)

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(one)

    anyio.run(test)
    assert sorted(type(one).__name__ for one in found) == ["OSError", "tuple", "tuple"]


def test_a_stream_that_is_cut_while_it_looks_leaves_the_others_theirs() -> None:
    streams, looks, found = OpenStreams(), Looks(), []

    async def test() -> None:
        async with anyio.create_task_group() as tasks:

            async def first() -> None:
                with anyio.move_on_after(0.01):
                    await streams.look("acme", "job", looks.of("job"))

            async def second() -> None:
                await anyio.sleep(0.005)
                found.append(await streams.look("acme", "job", looks.of("job")))

            tasks.start_soon(first)
            tasks.start_soon(second)

    anyio.run(test)
    assert len(found) == 1


def test_looks_of_one_tenant_leave_threads_for_those_of_others() -> None:
    streams, hang, began = OpenStreams(), threading.Event(), list[int]()

    def hanging(number: int) -> Callable[[], News]:
        def look() -> News:
            began.append(number)
            assert hang.wait(30)
            return [], True

        return look

    async def test() -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(2 * MAX_LOOKING):
                tasks.start_soon(streams.look, "loud", number, hanging(number))
            await anyio.wait_all_tasks_blocked()
            with anyio.fail_after(10):
                assert await streams.look("quiet", "job", lambda: ([(1, "new")], False)) == ([(1, "new")], False)
            assert len(began) == MAX_LOOKING_OF_TENANT
            hang.set()

    anyio.run(test)
    assert len(began) == 2 * MAX_LOOKING
