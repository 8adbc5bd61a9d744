"""What Dagster shows and keeps of adapters' stages: their changes in order, from the audit log, and the jobs of those not archived."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import sqlalchemy as sa

from control_plane.adapters.tables import adapters
from control_plane.platform.context import Platform
from control_plane.tenants.tables import audit_log
from ft_assets.adapters.stages import Stage

SETTLED = timedelta(seconds=30)
"""Lines younger than this wait: one with a lower number may still be uncommitted. A statement takes 30 s at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageChange:
    tenant: str
    job_id: str
    adapter_id: str
    before: str
    after: str
    actor: str
    """Kind and id: ``key:key_...``, ``operator:...``, ``system:...``."""
    at: datetime


def stage_changes(platform: Platform, *, after: int, limit: int = 100) -> tuple[Sequence[StageChange], int]:
    """Return the changes after line `after` of the audit log, oldest first, and the line to continue from."""
    log, stage = audit_log.c, audit_log.c.changes["stage"]
    settled = sa.select(sa.func.max(log.seq)).where(log.seq > after, log.created_at <= platform.clock() - SETTLED)
    found = (
        sa.select(log.seq, log.actor_kind, log.actor_id, log.created_at, adapters.c.id, adapters.c.tenant_id, adapters.c.job_id)
        .add_columns(stage[0].astext.label("before"), stage[1].astext.label("after"))
        .join(adapters, adapters.c.id == log.object_id)
        .where(log.object_type == "adapter", log.action == "adapter.updated", stage.is_not(None))
        .order_by(log.seq)
    )
    with platform.engine.connect() as conn:
        last = conn.execute(settled).scalar()
        if last is None:
            return [], after
        rows = conn.execute(found.where(log.seq > after, log.seq <= last).limit(limit)).all()
    changes = [
        StageChange(
            tenant=row.tenant_id, job_id=row.job_id, adapter_id=row.id, before=row.before, after=row.after,
            actor=f"{row.actor_kind}:{row.actor_id}", at=row.created_at,
        )
        for row in rows
    ]  # fmt: skip
    return changes, rows[-1].seq if len(rows) == limit else last


def jobs_with_live_adapters(platform: Platform, job_ids: Collection[str]) -> set[str]:
    """Return those of the jobs whose adapter is not archived."""
    live = sa.select(adapters.c.job_id).where(adapters.c.job_id.in_(job_ids), adapters.c.stage != Stage.ARCHIVED.value)
    with platform.engine.connect() as conn:
        return set(conn.execute(live).scalars())
