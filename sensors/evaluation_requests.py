"""Run requests for ordered evaluations, and another one if a run died; shared by the sensor and the queue listener."""

import logging
from datetime import timedelta

import dagster as dg

from control_plane.evaluations import service
from control_plane.platform.context import Platform
from control_plane.platform.protocols import Launcher
from control_plane.queue import launches
from core.errors import Unavailable
from ft_assets.partitions import partition_key
from resources.dagster.run_tags import ASKED_BY_TAG, EVALUATION_TAG, JOB_TAG, RUN_KEY_TAG, SENSOR_TAG, TENANT_TAG
from sensors.recovery import UNQUEUED
from sensors.run_coordinator import ORDERED_JOB
from sensors.run_requests import MAX_REQUESTS_PER_TICK

SETTLED = timedelta(seconds=2)
"""Grace period after its end, while what a run wrote may still be on its way."""

log = logging.getLogger(__name__)


def due_requests(platform: Platform, instance: dg.DagsterInstance, launcher: Launcher, *, by: str = "sensor") -> list[dg.RunRequest]:
    """Return the requests of orders that hold a reservation or have their result."""
    due = [d for d in service.due(platform) if not _has_run(instance, platform, launcher, d)][:MAX_REQUESTS_PER_TICK]
    if due:
        launches.returned(platform, {d.job_id for d in due})
    return [_run_request(d, by) for d in due]


def _has_run(instance: dg.DagsterInstance, platform: Platform, launcher: Launcher, due: service.DueEvaluation) -> bool:
    """Whether a run already serves the order; one that ended before the order did is given up, and the next tick requests another."""
    records = instance.get_run_records(dg.RunsFilter(tags={RUN_KEY_TAG: due.run_key}), limit=1)
    if not records:
        return False
    run, silent = records[0].dagster_run, platform.clock() - records[0].update_timestamp
    if run.status is dg.DagsterRunStatus.NOT_STARTED and silent > UNQUEUED:
        instance.report_run_failed(run, message="it never entered the queue; the evaluation gets another run")
    elif run.is_finished and silent > SETTLED:
        try:
            service.replace_run(platform, launcher, due, f"run {run.run_id} ended {run.status.value}")
        except Unavailable as error:  # the next tick tries again
            log.warning("the workload of %s cannot be stopped now: %s", due.id, error.message)
    return True


def _run_request(due: service.DueEvaluation, by: str) -> dg.RunRequest:
    tags = {TENANT_TAG: due.tenant, JOB_TAG: due.job_id, EVALUATION_TAG: due.id, RUN_KEY_TAG: due.run_key, ASKED_BY_TAG: by}
    return dg.RunRequest(
        run_key=due.run_key,
        job_name=ORDERED_JOB,
        partition_key=partition_key(due.tenant, due.job_id),
        run_config={"ops": {"adapter_evaluation": {"config": {"evaluation_id": due.id}}}},
        tags={**tags, SENSOR_TAG: "evaluations", "dagster/priority": str(due.priority)},
    )
