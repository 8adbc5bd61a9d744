"""The library's worker, without three ways in which it would leave a task lying."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from procrastinate.jobs import Job, Notification
from procrastinate.worker import Worker

log = logging.getLogger(__name__)


class QueueWorker(Worker):
    """Takes the tasks of a queue and runs them.

    1. A task that is announced during a look that finds nothing is looked for at once; the library forgets the announcement.
    2. A worker that cannot record the end of a task stops, so that others run the task again; the library would keep it and its lock.
    3. A worker stops when it can no longer send heartbeats or listen; the library notices this only where it adds periodic tasks.
    """

    _announced = 0

    async def stopped(self) -> None:
        """Wait until it is to stop, or has to, however long its running tasks take."""
        await self._stop_event.wait()

    async def _handle_notification(self, *, channel: str, notification: Notification) -> None:
        self._announced += 1
        await super()._handle_notification(channel=channel, notification=notification)

    async def _fetch_and_process_jobs(self) -> None:
        before = -1
        while before != self._announced:
            before = self._announced
            await super()._fetch_and_process_jobs()  # type: ignore[no-untyped-call]

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
