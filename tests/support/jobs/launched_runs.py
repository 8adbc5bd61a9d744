"""Counts Dagster runs of jobs."""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa

from control_plane.platform.context import Platform
from control_plane.queue.tables import run_launches


def runs_by_requester(platform: Platform) -> Mapping[str, int]:
    """Count runs by who launched them."""
    query = sa.select(run_launches.c.claimed_by, sa.func.count()).where(run_launches.c.run_id.is_not(None))
    with platform.engine.connect() as conn:
        return {str(who): int(count) for who, count in conn.execute(query.group_by(run_launches.c.claimed_by))}
