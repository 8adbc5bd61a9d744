"""Submits trials of sweeps as their tenant's limits make room."""

import dagster as dg

from control_plane.jobs.sweeps import service
from ft_assets.platform_resource import PlatformResource


@dg.sensor(minimum_interval_seconds=3, default_status=dg.DefaultSensorStatus.RUNNING)
def sweeps(context: dg.SensorEvaluationContext, platform: PlatformResource) -> dg.SkipReason:
    """Runs one pass; a trial that does not fit yet is retried on the next tick."""
    return dg.SkipReason(f"submitted: {', '.join(service.advance(platform.get())) or 'none'}")
