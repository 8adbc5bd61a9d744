"""The tasks of the worker process, each a call of one function of its noun."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from procrastinate import App, BaseConnector, BaseRetryStrategy, JobContext, RetryDecision
from procrastinate.jobs import Job
from procrastinate.manager import JobManager
from procrastinate.worker import Worker

from control_plane.adapters.exporting import orders
from control_plane.datasets import validation_tasks
from control_plane.datasets.uploads import uploaded_files
from control_plane.exports import export_workload
from control_plane.notifications import dispatch, outbox
from control_plane.platform.context import Platform
from control_plane.platform.secrets import unseal
from control_plane.tracking import wandb_runs
from control_plane.worker.periodic_work import ROUNDS, Round
from core.errors import FtError, IntegrityError, NotFound
from core.telemetry import correlation
from resources.launcher import open_launcher

HEARTBEAT_S, LOST_AFTER_S = 5.0, 15.0
"""Interval of a worker's heartbeats, and how long one may be silent before its tasks are given to others."""
FIRST_RETRY_S, LAST_RETRY_S = 5, 60
"""Pause before a failed task is tried again, which doubles from the first up to the last."""

RETRY_LOST = """
WITH lost AS MATERIALIZED (
    SELECT j.id, j.task_name FROM procrastinate_jobs j LEFT JOIN procrastinate_workers w ON w.id = j.worker_id
    WHERE j.status = 'doing' AND (j.worker_id IS NULL OR w.last_heartbeat < now() - make_interval(secs => %(seconds)s))
    FOR UPDATE OF j SKIP LOCKED
)
SELECT task_name, procrastinate_retry_job_v2(id, NULL, NULL, NULL, NULL) FROM lost
"""
"""The library's look and its retry are two statements, between which another worker may have taken a task."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Again(BaseRetryStrategy):
    """Tries a task again until it succeeds: what cannot succeed is recorded by the task itself."""

    in_turn: bool = False
    """Whether later tasks of its turn wait for it."""

    def get_retry_decision(self, *, exception: BaseException, job: Job) -> RetryDecision:  # noqa: ARG002 - the library's signature
        pause_s = min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** min(job.attempts, 8))
        return RetryDecision(retry_in={"seconds": pause_s}, lock=None if self.in_turn else f"{job.task_name} {job.id}")


def make_app(connector: BaseConnector, platform: Platform, *, periodic: bool) -> App:
    """Return the queue of `connector` with all tasks of `platform`; if `periodic`, a worker of it adds those that are due at intervals.

    Of each round, at most one runs and one waits.
    """
    app = App(connector=connector)
    app.task(name=outbox.FAN_OUT, retry=Again(in_turn=True))(lambda: outbox.fan_out(platform))
    app.task(name=outbox.DELIVER, retry=Again(in_turn=True))(lambda target: dispatch.deliver(platform, target))
    app.task(name=validation_tasks.VALIDATE, retry=Again())(partial(validate, platform))
    app.task(name=validation_tasks.FETCH, retry=Again())(partial(fetch, platform))
    app.task(name=orders.EXPORT, retry=Again())(partial(export, platform))
    app.task(name=wandb_runs.SEND, retry=Again())(lambda job_id, tenant: wandb_runs.send(platform, tenant, job_id))
    for each in ROUNDS:
        _add_round(app, each.name, each.cron, each.queue, partial(_run_round, platform, each), periodic=periodic)
    return app


def validate(platform: Platform, *, file_id: str, tenant: str) -> None:
    """Validate a file, if it is of `tenant`."""
    uploaded_files.validate(platform, uploaded_files.get(platform, tenant, file_id).id)


def fetch(platform: Platform, *, file_id: str, tenant: str, sealed_token: str) -> None:
    """Fetch an import, if it is of `tenant`, with its token if it was given one."""
    uploaded_files.get(platform, tenant, file_id)
    try:
        token = unseal(platform.settings, sealed_token) if sealed_token else ""
    except IntegrityError as error:
        if error.code != "secrets_key_mismatch":
            raise  # a key file with a wrong mode will be mended
        uploaded_files.refuse_without_token(platform, file_id)
    else:
        uploaded_files.fetch(platform, file_id, hub_token=token)


def export(platform: Platform, *, export_id: str, tenant: str) -> None:
    """Make an export, or start the workload that makes it."""
    export_workload.carry_out(platform, open_launcher(platform.settings), tenant, export_id)


def _add_round(app: App, name: str, cron: str, queue: str, work: Callable[[], Any], *, periodic: bool) -> None:
    task = app.task(name=name, queue=queue, lock=name, queueing_lock=name)(lambda timestamp: work())  # noqa: ARG005
    if periodic:
        app.periodic(cron=cron)(task)


def _run_round(platform: Platform, each: Round) -> None:
    log.debug("%s: %s", each.name, each.run(platform))


async def rescue(manager: JobManager) -> None:
    """Let other workers run the tasks of those that ended without a word or do not answer."""
    for lost in await manager.connector.execute_query_all_async(RETRY_LOST, seconds=LOST_AFTER_S):
        log.warning("task %s is run again: its worker is gone", lost["task_name"])
    await manager.prune_stalled_workers(LOST_AFTER_S)


def logged(call_next: Callable[[], Any], context: JobContext, _worker: Worker) -> Any:
    """Runs a task with its tenant in every log line, and logs why it failed; the library would log its arguments."""
    with correlation.scope(tenant=cast(str | None, context.job.task_kwargs.get("tenant"))):
        try:
            return call_next()
        except NotFound as error:
            log.info("task %s has nothing to do: %s", context.job.task_name, error.message)  # it was deleted meanwhile
        except FtError as error:
            log.warning("task %s is tried again: %s", context.job.task_name, error.message)
            raise
        except Exception:
            log.exception("task %s is tried again", context.job.task_name)
            raise
