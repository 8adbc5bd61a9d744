"""The library's worker for several queues with slots of their own, without four ways in which it would leave a task lying."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from procrastinate import App
from procrastinate.job_context import JobContext
from procrastinate.jobs import Job, Notification
from procrastinate.worker import Worker

log = logging.getLogger(__name__)


class QueueWorker(Worker):
    """Takes tasks and runs them, of each queue at most as many at once as it has `slots`.

    One worker serves all queues: each worker holds a connection that listens, sends heartbeats, and looks for tasks that have become due.

    1. A task that is announced during a look that finds nothing is looked for at once; the library forgets the announcement.
    2. A worker that cannot record the end of a task stops, so that others run the task again; the library would keep it and its lock.
    3. A worker stops when it can no longer send heartbeats or listen; the library notices this only where it adds periodic tasks.
    4. A worker stops when it cannot fetch tasks; the library would first wait for its running ones, which may take hours.
    """

    def __init__(self, app: App, *, slots: Mapping[str, int], **options: Any) -> None:
        self._slots, self._announced = slots, 0
        super().__init__(app, queues=slots, concurrency=sum(slots.values()), **options)

    @property
    def queues(self) -> list[str]:
        """Return the queues with a free slot: only their tasks are fetched."""
        taken = Counter(context.job.queue for context in self._running_jobs.values())
        return [queue for queue, slots in self._slots.items() if taken[queue] < slots]

    @queues.setter
    def queues(self, _all: Iterable[str] | None) -> None:
        self._running_jobs = {}  # the library sets the queues first

    async def stopped(self) -> None:
        """Wait until it is to stop, or has to, however long its running tasks take."""
        await self._stop_event.wait()

    async def _handle_notification(self, *, channel: str, notification: Notification) -> None:
        self._announced += 1
        await super()._handle_notification(channel=channel, notification=notification)

    async def _process_job(self, context: JobContext) -> None:
        await super()._process_job(context)  # type: ignore[no-untyped-call]
        if context.job.queue not in self.queues and (task := asyncio.current_task()) is not None:
            task.add_done_callback(lambda _: self._look_again())  # after the library's own, which frees the slot

    def _look_again(self) -> None:
        self._announced += 1
        self._new_job_event.set()

    async def _fetch_and_process_jobs(self) -> None:
        before = -1
        try:
            while before != self._announced:
                before = self._announced
                await super()._fetch_and_process_jobs()  # type: ignore[no-untyped-call]
        except Exception:
            log.exception("no tasks can be fetched")
            self.stop()  # type: ignore[no-untyped-call]
            raise

    async def _monitor_side_tasks(self, side_tasks: list[asyncio.Task[Any]]) -> None:
        try:
            await asyncio.gather(*side_tasks)
        except Exception:
            log.exception("the work on %s stops", self.queues)
            self.stop()  # type: ignore[no-untyped-call]

    async def _persist_job_status(self, job: Job, *args: Any, **kwargs: Any) -> None:
        try:
            await super()._persist_job_status(job, *args, **kwargs)
        except Exception:
            log.exception("the end of task %s could not be recorded", job.task_name)
            self.stop()  # type: ignore[no-untyped-call]
            raise
