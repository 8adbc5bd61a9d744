"""The queue as the policy is given it: a frozen snapshot, read in a few queries."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from control_plane import scheduler
from control_plane.jobs import JobState
from control_plane.pools import Pool
from control_plane.service import quotas
from control_plane.service.gpu_pools import pools
from control_plane.service.platform import Platform
from control_plane.tables import jobs, reservations, tenants


def queue_snapshot(platform: Platform) -> scheduler.Snapshot:
    """The queue as it is now, of all tenants and without a lock on it: for estimates."""
    with platform.whole.engine.connect() as conn:
        return read(conn, pools(platform), platform.clock(), lock=False)[0]


def read(
    conn: sa.Connection, available: list[Pool], now: datetime, *, lock: bool = True
) -> tuple[scheduler.Snapshot, dict[str, sa.Row[Any]]]:
    query = sa.select(jobs).where(jobs.c.state == JobState.QUEUED)
    queued = conn.execute(query.with_for_update(skip_locked=True) if lock else query).all()
    held = conn.execute(
        sa.select(reservations, jobs.c.expected_s, jobs.c.tier)
        .join(jobs, jobs.c.id == reservations.c.job_id)
        .where(reservations.c.released_at.is_(None))
    ).all()
    waiting = [
        scheduler.Waiting(
            job_id=r.id,
            tenant=r.tenant_id,
            tier=r.tier,
            num_gpus=r.num_gpus,
            queued_at=(r.queued_at or now).timestamp(),
            expected_s=r.expected_s or 0.0,
        )
        for r in queued
    ]
    running = [
        scheduler.Running(
            job_id=r.job_id,
            pool=r.pool,
            num_gpus=r.num_gpus,
            tier=r.tier,
            expected_end=max(now.timestamp(), r.granted_at.timestamp() + (r.expected_s or 0.0)),
        )
        for r in held
    ]
    owners = {w.tenant for w in waiting}
    capped = quotas.capped(conn, owners, now, num_gpus=sum(p.num_gpus for p in available))
    suspended = _suspended(conn, owners)
    snapshot = scheduler.Snapshot(pools=available, waiting=waiting, running=running, capped=capped, suspended=suspended)
    return snapshot, {r.id: r for r in queued}


def _suspended(conn: sa.Connection, tenant_ids: Collection[str]) -> dict[str, str]:
    """Of these tenants, those who are suspended, with the reason in words."""
    if not tenant_ids:
        return {}
    query = sa.select(tenants).where(tenants.c.id.in_(tenant_ids), tenants.c.suspended_at.is_not(None))
    told = "the tenant {} is suspended since {:%Y-%m-%d %H:%M} UTC: {}. The job starts once an operator lets the tenant in again"
    return {r.id: told.format(r.id, r.suspended_at, r.suspended_reason) for r in conn.execute(query)}
