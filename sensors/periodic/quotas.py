"""Notifies tenants of limits they reach; pauses what runs beyond a hard cap, and resumes it when there is room."""

import dagster as dg

from control_plane.quotas import enforcement
from ft_assets.platform_resource import PlatformResource


@dg.sensor(minimum_interval_seconds=10, default_status=dg.DefaultSensorStatus.RUNNING)
def quotas(context: dg.SensorEvaluationContext, platform: PlatformResource) -> dg.SkipReason:
    """Runs one pass over all tenants whose use may have changed."""
    done = enforcement.enforce(platform.get())
    for what, jobs in (("paused", done.paused), ("resumed", done.resumed)):
        if jobs:
            context.log.info(f"{what}: {', '.join(jobs)}")
    return dg.SkipReason(f"notices: {done.notices}; paused: {len(done.paused)}; resumed: {len(done.resumed)}")
