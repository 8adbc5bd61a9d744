"""Gives admitted jobs their partition and their preparation run."""

import dagster as dg

from control_plane.queue.launches import due_runs
from ft_assets.asset_jobs import PREPARE
from ft_assets.partitions import JOBS, partition_key
from ft_assets.platform_resource import PlatformResource
from sensors.run_requests import FALLBACK_S, missing, run_request


@dg.sensor(job=PREPARE, minimum_interval_seconds=FALLBACK_S, default_status=dg.DefaultSensorStatus.RUNNING)
def admission(context: dg.SensorEvaluationContext, platform: PlatformResource) -> dg.SensorResult | dg.SkipReason:
    """Adds the partition key of each job in ``validating`` and requests its ``prepare`` run."""
    opened = platform.get()
    due = missing(opened, context.instance, due_runs(opened, ("prepare",)), by="sensor")
    if not due:
        return dg.SkipReason("no job waits for its preparation")
    keys = [partition_key(d.tenant, d.job_id) for d in due]
    return dg.SensorResult(run_requests=[run_request(d) for d in due], dynamic_partitions_requests=[JOBS.build_add_request(keys)])
