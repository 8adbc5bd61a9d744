"""The tasks of the worker process, each a call of one function of its noun."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from procrastinate import App, BaseConnector, BaseRetryStrategy, JobContext, RetryDecision
from procrastinate.jobs import Job
from procrastinate.manager import JobManager
from procrastinate.worker import Worker

from control_plane.notifications import dispatch, outbox
from control_plane.platform.context import Platform
from control_plane.worker.periodic_work import QUICK, ROUNDS, Round
from ft_assets.errors import FtError
from ft_assets.telemetry import correlation

HEARTBEAT_S, LOST_AFTER_S = 5.0, 15.0
"""Interval of a worker's heartbeats, and how long one may be silent before its tasks are given to others."""
FIRST_RETRY_S, LAST_RETRY_S = 5, 60
"""Pause before a failed task is tried again, which doubles from the first up to the last."""

log = logging.getLogger(__name__)


class Again(BaseRetryStrategy):
    """Tries a task again until it succeeds: what cannot succeed is recorded by the task itself."""

    def get_retry_decision(self, *, exception: BaseException, job: Job) -> RetryDecision:  # noqa: ARG002 - the library's signature
        return RetryDecision(retry_in={"seconds": min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** min(job.attempts, 8))})


AGAIN = Again()


def make_app(connector: BaseConnector, platform: Platform, *, periodic: bool) -> App:
    """Return the queue of `connector` with all tasks of `platform`; if `periodic`, a worker of it adds those that are due at intervals.

    Of each round, at most one runs and one waits.
    """
    app = App(connector=connector)
    app.task(name=outbox.FAN_OUT, retry=AGAIN)(lambda: outbox.fan_out(platform))
    app.task(name=outbox.DELIVER, retry=AGAIN)(lambda target: dispatch.deliver(platform, target))
    for each in ROUNDS:
        _add_round(app, each.name, each.cron, each.queue, partial(_run_round, platform, each), periodic=periodic)
    _add_round(app, "rescue", "* * * * * */10", QUICK, lambda: rescue(app.job_manager), periodic=periodic)
    return app


def _add_round(app: App, name: str, cron: str, queue: str, work: Callable[[], Any], *, periodic: bool) -> None:
    task = app.task(name=name, queue=queue, lock=name, queueing_lock=name)(lambda timestamp: work())  # noqa: ARG005
    if periodic:
        app.periodic(cron=cron)(task)


def _run_round(platform: Platform, each: Round) -> None:
    log.debug("%s: %s", each.name, each.run(platform))


async def rescue(manager: JobManager) -> None:
    """Let other workers run the tasks of those that ended without a word or do not answer."""
    for job in await manager.get_stalled_jobs(seconds_since_heartbeat=LOST_AFTER_S):
        log.warning("task %s is run again: its worker is gone", job.task_name)
        await manager.retry_job(job)
    await manager.prune_stalled_workers(LOST_AFTER_S)


def logged(call_next: Callable[[], Any], context: JobContext, _worker: Worker) -> Any:
    """Runs a task with its tenant in every log line, and logs why it failed; the library would log its arguments."""
    with correlation.scope(tenant=context.job.task_kwargs.get("tenant")):
        try:
            return call_next()
        except FtError as error:
            log.warning("task %s is tried again: %s", context.job.task_name, error.message)
            raise
        except Exception:
            log.exception("task %s is tried again", context.job.task_name)
            raise
