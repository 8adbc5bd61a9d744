"""The worker of a platform in a thread of the test, without periodic work: until the test is done with it, or until nothing is due."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta

import sqlalchemy as sa

from control_plane.platform.context import Platform
from control_plane.worker import process
from control_plane.worker.tasks import make_app

ENDS_S = 60.0


@contextmanager
def working(platform: Platform) -> Iterator[None]:
    """Run the worker beside the test."""
    loop, ending = asyncio.new_event_loop(), asyncio.Event()

    def work() -> None:
        with closing(loop):
            loop.run_until_complete(process.run(platform, ending, periodic=False))
            loop.run_until_complete(_cancel_rest())

    thread = threading.Thread(target=work, name="worker", daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(ending.set)
        thread.join(ENDS_S)
        assert not thread.is_alive(), "the worker did not end"


async def _cancel_rest() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


def work_off(platform: Platform) -> None:
    """Run every task that is due, and those that they add."""

    async def until_idle() -> None:
        app = make_app(process.connector(platform), platform, periodic=False)
        async with app.open_async():
            while _num_due(platform):
                await process.make_worker(app, wait=False).run()

    asyncio.run(until_idle())


def pass_time(platform: Platform, seconds: float) -> None:
    """Make tasks due that are due within `seconds`, for a test with a clock of its own."""
    earlier = sa.text("UPDATE tasks.procrastinate_jobs SET scheduled_at = scheduled_at - :by WHERE scheduled_at IS NOT NULL")
    with platform.logins.platform.begin() as conn:
        conn.execute(earlier, {"by": timedelta(seconds=seconds)})


def _num_due(platform: Platform) -> int:
    query = "SELECT count(*) FROM tasks.procrastinate_jobs WHERE status = 'todo' AND (scheduled_at IS NULL OR scheduled_at <= now())"
    with platform.logins.platform.connect() as conn:
        return int(conn.execute(sa.text(query)).scalar_one())
