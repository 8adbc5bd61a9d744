"""Uploads that nobody completed, what ended ones left behind, and files whose time is over."""

import dagster as dg
from sqlalchemy.exc import SQLAlchemyError

from control_plane.service import files
from control_plane.service import uploads as service
from control_plane.service.platform import Platform
from ft_assets.errors import FtError
from resources.dagster_platform import PlatformResource


@dg.sensor(minimum_interval_seconds=60, default_status=dg.DefaultSensorStatus.RUNNING)
def uploads(context: dg.SensorEvaluationContext, platform: PlatformResource) -> dg.SkipReason:
    """One round; what fails is told, and tried again by the next."""
    return dg.SkipReason(one_round(platform.get()))


def one_round(platform: Platform) -> str:
    try:
        expired, parts = service.tidy(platform)
        gone = files.delete_expired(platform)
    except (FtError, OSError, SQLAlchemyError) as error:
        return f"failed, {type(error).__name__}: {str(error)[:200]}"
    return f"uploads expired: {expired}; parts removed: {parts}; expired files deleted: {gone}"
