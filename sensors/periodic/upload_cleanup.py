"""Deletes uploads that were never completed, expired files, and objects without a row."""

from collections.abc import Callable

import dagster as dg
from sqlalchemy.exc import SQLAlchemyError

from control_plane.datasets.uploads import multipart_uploads as service
from control_plane.datasets.uploads import orphaned_objects, uploaded_files
from control_plane.platform.context import Platform
from ft_assets.errors import FtError
from ft_assets.platform_resource import PlatformResource

STEPS: tuple[tuple[str, Callable[[Platform], int]], ...] = (
    ("uploads expired", service.tidy),
    ("expired files deleted", uploaded_files.delete_expired),
    ("objects removed", orphaned_objects.remove_due),
)


@dg.sensor(minimum_interval_seconds=60, default_status=dg.DefaultSensorStatus.RUNNING)
def uploads(context: dg.SensorEvaluationContext, platform: PlatformResource) -> dg.SkipReason:
    """Runs one pass; failures are logged and retried by the next."""
    return dg.SkipReason(one_round(platform.get()))


def one_round(platform: Platform) -> str:
    """Runs every step, whatever happens in those before it."""
    return "; ".join(f"{what}: {_outcome(step, platform)}" for what, step in STEPS)


def _outcome(step: Callable[[Platform], int], platform: Platform) -> str:
    try:
        return str(step(platform))
    except (FtError, OSError, SQLAlchemyError) as error:
        return f"failed, {type(error).__name__}: {str(error)[:200]}"
