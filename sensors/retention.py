"""What ended jobs left behind goes when its time is over."""

import dagster as dg

from control_plane.service.retention import retire_ended
from ft_assets.errors import Unavailable
from resources.dagster_platform import PlatformResource


@dg.sensor(minimum_interval_seconds=600, default_status=dg.DefaultSensorStatus.RUNNING)
def retention(context: dg.SensorEvaluationContext, platform: PlatformResource) -> dg.SkipReason:
    """One round over the jobs that ended a week ago; their finished models stay."""
    try:
        return dg.SkipReason(f"jobs whose checkpoints were removed: {retire_ended(platform.get())}")
    except Unavailable as error:
        return dg.SkipReason(f"the object store does not answer: {error.message}")
