"""Removes the partition keys of jobs that ended long ago from Dagster's lists; their runs and events stay."""

import dagster as dg

from control_plane.queue import launches as service
from ft_assets.partitions import JOBS, partition_key
from ft_assets.platform_resource import PlatformResource

MAX_KEYS_PER_TICK = 200
"""A key takes a statement of 2 ms; 12,000 an hour are 24 times as many jobs as a day brings."""


@dg.sensor(minimum_interval_seconds=60, default_status=dg.DefaultSensorStatus.RUNNING)
def partitions(context: dg.SensorEvaluationContext, platform: PlatformResource) -> dg.SkipReason:
    """Deletes the keys first and marks them afterwards: what is cut off in between is repeated."""
    opened = platform.get()
    gone = service.retirable(opened, limit=MAX_KEYS_PER_TICK)
    for job in gone:
        context.instance.delete_dynamic_partition(str(JOBS.name), partition_key(job.tenant, job.job_id))
    service.retired(opened, [job.job_id for job in gone])
    return dg.SkipReason(f"partition keys retired: {len(gone)}")
