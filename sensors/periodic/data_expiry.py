"""Deletes what ended jobs left behind, deprecated adapters after their grace period, and data that tenants want deleted."""

from collections.abc import Callable, Mapping

import dagster as dg
from sqlalchemy.exc import SQLAlchemyError

from control_plane.attempts.checkpoint_retention import retire_ended
from control_plane.datasets import cold_storage
from control_plane.jobs import duplicate_requests
from control_plane.platform.context import Platform
from control_plane.tenant_data import deletion, deletion_requests
from ft_assets.errors import FtError
from ft_assets.platform_resource import PlatformResource

ROUND_S = 10.0
"""Time limit of each kind of work per tick: all of them together have a minute."""
ROUNDS: Mapping[str, Callable[[Platform], object]] = {
    "deletions done": lambda platform: deletion.carry_out_all(platform, budget_s=2 * ROUND_S),
    "adapters archived": deletion_requests.archive_due,
    "jobs whose checkpoints were removed": lambda platform: retire_ended(platform, budget_s=ROUND_S),
    "idempotency keys forgotten": duplicate_requests.purge,
    "datasets in cold storage": lambda platform: cold_storage.cool_unused(platform, budget_s=ROUND_S),
}


@dg.sensor(minimum_interval_seconds=600, default_status=dg.DefaultSensorStatus.RUNNING)
def retention(context: dg.SensorEvaluationContext, platform: PlatformResource) -> dg.SkipReason:
    """Deletes everything whose time is up; failures are logged, do not stop the rest, and are retried."""
    return dg.SkipReason(one_round(platform.get()))


def one_round(platform: Platform) -> str:
    reported = []
    for what, work in ROUNDS.items():
        try:
            reported.append(f"{what}: {work(platform)}")
        except (FtError, OSError, SQLAlchemyError) as error:
            reported.append(f"{what}: failed, {type(error).__name__}: {str(error)[:200]}")
    return "; ".join(reported)
