"""Requests runs for ordered evaluations, and another one if a run died."""

from datetime import timedelta

import dagster as dg

from control_plane.evaluations import service
from control_plane.platform.context import Platform
from control_plane.queue import launches
from ft_assets.adapters import reevaluation_step
from ft_assets.asset_jobs import REEVALUATE
from ft_assets.partitions import JOBS, partition_key
from ft_assets.platform_resource import PlatformResource
from resources.dagster.run_tags import EVALUATION_TAG, JOB_TAG, RUN_KEY_TAG, TENANT_TAG
from sensors.run_requests import MAX_REQUESTS_PER_TICK

SETTLED = timedelta(seconds=2)
"""Grace period after its end, while what a run wrote may still be on its way."""


@dg.sensor(job=REEVALUATE, minimum_interval_seconds=2, default_status=dg.DefaultSensorStatus.RUNNING)
def evaluations(context: dg.SensorEvaluationContext, platform: PlatformResource) -> dg.SensorResult | dg.SkipReason:
    """Requests a run for each order that holds a reservation or has its result, once per number of runs."""
    opened = platform.get()
    reevaluation_step.take_up(opened)
    due = [d for d in service.due(opened) if not _has_run(context.instance, opened, d)][:MAX_REQUESTS_PER_TICK]
    if not due:
        return dg.SkipReason("no evaluation needs a run")
    launches.returned(opened, {d.job_id for d in due})
    keys = sorted({partition_key(d.tenant, d.job_id) for d in due})
    return dg.SensorResult(run_requests=[_run_request(d) for d in due], dynamic_partitions_requests=[JOBS.build_add_request(keys)])


def _has_run(instance: dg.DagsterInstance, platform: Platform, due: service.DueEvaluation) -> bool:
    """Whether a run already serves the order; one that ended before the order did is given up, and the next tick requests another."""
    records = instance.get_run_records(dg.RunsFilter(tags={RUN_KEY_TAG: due.run_key}), limit=1)
    if records and records[0].dagster_run.is_finished and platform.clock() - records[0].update_timestamp > SETTLED:
        run = records[0].dagster_run
        service.replace_run(platform, due, f"run {run.run_id} ended {run.status.value}")
    return bool(records)


def _run_request(due: service.DueEvaluation) -> dg.RunRequest:
    tags = {TENANT_TAG: due.tenant, JOB_TAG: due.job_id, EVALUATION_TAG: due.id, RUN_KEY_TAG: due.run_key}
    return dg.RunRequest(
        run_key=due.run_key,
        partition_key=partition_key(due.tenant, due.job_id),
        run_config={"ops": {"adapter_evaluation": {"config": {"evaluation_id": due.id}}}},
        tags={**tags, "dagster/priority": str(due.priority)},
    )
