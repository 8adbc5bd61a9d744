"""What Dagster shows and keeps of adapters' stages: their changes in order, from the audit log, and the jobs of those not archived."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import sqlalchemy as sa

from control_plane.adapters.tables import adapters
from control_plane.platform.context import Platform
from control_plane.platform.records import many
from control_plane.tenants.tables import audit_log
from engine.adapters import Stage

SETTLED = timedelta(seconds=30)
"""Lines younger than this wait: one with a lower number may still be uncommitted. A statement takes 30 s at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageChange:
    seq: int
    """Line of the audit log."""
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
        sa.select(log.seq, log.created_at.label("at"), (log.actor_kind + ":" + log.actor_id).label("actor"), adapters.c.job_id)
        .add_columns(adapters.c.tenant_id.label("tenant"), adapters.c.id.label("adapter_id"))
        .add_columns(stage[0].astext.label("before"), stage[1].astext.label("after"))
        .join(adapters, adapters.c.id == log.object_id)
        .where(log.object_type == "adapter", log.action == "adapter.updated", stage.is_not(None))
        .order_by(log.seq)
    )
    with platform.engine.connect() as conn:
        last = conn.execute(settled).scalar()
        if last is None:
            return [], after
        changes = many(conn, found.where(log.seq > after, log.seq <= last).limit(limit), StageChange)
    return changes, changes[-1].seq if len(changes) == limit else last


def jobs_with_live_adapters(platform: Platform, job_ids: Collection[str]) -> set[str]:
    """Return those of the jobs whose adapter is not archived."""
    live = sa.select(adapters.c.job_id).where(adapters.c.job_id.in_(job_ids), adapters.c.stage != Stage.ARCHIVED.value)
    with platform.engine.connect() as conn:
        return set(conn.execute(live).scalars())
