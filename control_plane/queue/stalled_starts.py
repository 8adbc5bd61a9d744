"""Jobs that were given GPUs and whose workload the machines do not let in: released, and not running."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.attempts.tables import attempts
from control_plane.jobs.tables import job_events, jobs
from control_plane.jobs.transitions import record_many
from control_plane.platform.bulk_updates import among
from control_plane.platform.job_events import FOR_OPERATORS, Event
from control_plane.platform.job_states import JobState
from control_plane.queue.tables import reservations

ADMITTED_WITHIN = timedelta(seconds=60)
"""From reservation to workload: what the whole way from submission to its start may take while GPUs are free."""
RELEASE_OVERDUE = "release_overdue"


@dataclass(frozen=True, kw_only=True, slots=True)
class OverdueRelease:
    """A reservation without a workload."""

    job_id: str
    tenant: str
    attempt: int
    pool: str
    num_gpus: int
    granted_at: datetime
    age_s: float


def overdue_releases(conn: Connection, now: datetime) -> list[OverdueRelease]:
    """Reservations that were granted more than :data:`ADMITTED_WITHIN` ago and whose workload has not started, oldest first."""
    return [_overdue(r, now) for r in conn.execute(_late(now))]


def report(conn: Connection, now: datetime) -> int:
    """Write an event for operators, once per attempt, of each of them; returns of how many."""
    told = job_events.c.data["attempt"].as_integer() == reservations.c.attempt
    known = sa.exists().where(job_events.c.job_id == reservations.c.job_id, job_events.c.code == RELEASE_OVERDUE, told)
    late = {r.job_id: r for r in conn.execute(_late(now).where(~known))}
    if not late:
        return 0
    lock = sa.select(jobs.c.id).where(among(jobs.c.id, late)).order_by(jobs.c.id).with_for_update(skip_locked=True)
    locked = conn.execute(lock).scalars().all()
    record_many(conn, [(job_id, _event(_overdue(late[job_id], now))) for job_id in locked], now=now)
    return len(locked)


def _late(now: datetime) -> sa.Select[Any]:
    r = reservations.c
    return (
        sa.select(r.job_id, r.attempt, r.pool, r.num_gpus, r.granted_at, jobs.c.tenant_id)
        .join(jobs, jobs.c.id == r.job_id)
        .join(attempts, (attempts.c.job_id == r.job_id) & (attempts.c.attempt == r.attempt))
        .where(r.released_at.is_(None), r.granted_at < now - ADMITTED_WITHIN)
        .where(jobs.c.state == JobState.PROVISIONING, attempts.c.started_at.is_(None))
        .order_by(r.granted_at, r.job_id)
    )


def _overdue(row: sa.Row[Any], now: datetime) -> OverdueRelease:
    return OverdueRelease(
        job_id=row.job_id, tenant=row.tenant_id, attempt=row.attempt, pool=row.pool, num_gpus=row.num_gpus, granted_at=row.granted_at,
        age_s=(now - row.granted_at).total_seconds(),
    )  # fmt: skip


def _event(late: OverdueRelease) -> Event:
    return Event(
        code=RELEASE_OVERDUE,
        level="warn",
        message=f"Attempt {late.attempt} holds {late.num_gpus} GPU(s) of pool {late.pool} for {late.age_s:.0f} s and its workload has not "
        f"started; at most {ADMITTED_WITHIN.total_seconds():.0f} s are expected. Look at its run, and at the nodes of the pool.",
        data={"audience": FOR_OPERATORS, "attempt": late.attempt, "age_s": round(late.age_s, 1)},
    )
