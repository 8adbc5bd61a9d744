"""The queue's hands: read the snapshot, ask the policy, write reservations and reasons."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from control_plane import scheduler
from control_plane.jobs import JobState
from control_plane.service import metering, queue_reading
from control_plane.service.gpu_pools import pools
from control_plane.service.platform import Platform
from control_plane.service.transition import transition
from control_plane.tables import attempts, jobs, reservations

SCHEDULER_LOCK = 0x66745F73
"""Advisory lock ("ft_s"): one scheduling decision at a time, however many schedulers run."""


def place(platform: Platform) -> list[scheduler.Decision]:
    """One scheduling round, in one transaction: reservations for what starts, a reason and a position for what waits."""
    now = platform.clock()
    with platform.engine.begin() as conn:
        conn.execute(sa.select(sa.func.pg_advisory_xact_lock(SCHEDULER_LOCK)))
        snapshot, rows = queue_reading.read(conn, pools(platform), now)
        decisions = scheduler.schedule(snapshot, now=now.timestamp())
        for decision in decisions:
            if isinstance(decision, scheduler.Start):
                _reserve(conn, rows[decision.job_id], decision, now)
            elif isinstance(decision, scheduler.Wait):
                _explain(conn, rows[decision.job_id], decision, capped=rows[decision.job_id].tenant_id in snapshot.capped, now=now)
    return decisions


def _reserve(conn: sa.Connection, job: sa.Row[Any], decision: scheduler.Start, now: datetime) -> None:
    attempt = job.attempt + 1
    conn.execute(
        sa.insert(reservations).values(job_id=job.id, attempt=attempt, pool=decision.pool, num_gpus=decision.num_gpus, granted_at=now)
    )
    conn.execute(sa.insert(attempts).values(job_id=job.id, attempt=attempt, workload=f"{job.id}-a{attempt}"))
    transition(
        conn,
        job.id,
        JobState.PROVISIONING,
        message=f"Attempt {attempt} holds {decision.num_gpus} GPU(s) of pool {decision.pool}.",
        now=now,
        attempt=attempt,
        train_runs=0,
    )


def _explain(conn: sa.Connection, job: sa.Row[Any], wait: scheduler.Wait, *, capped: bool, now: datetime) -> None:
    estimate = None
    since = {"capped_at": now} if capped and job.started_at is None else {}
    if wait.expected_start is not None and job.expected_s is not None:
        estimate = datetime.fromtimestamp(wait.expected_start + job.expected_s, tz=UTC)
    conn.execute(
        sa.update(jobs)
        .where(jobs.c.id == job.id)
        .values(reason=wait.reason, reason_detail=wait.detail, queue_position=wait.position, estimated_finish_at=estimate, **since)
    )


def release(platform: Platform, job_id: str, attempt: int) -> None:
    """Give back a reservation whose attempt nobody could follow to its end; what ran is billed and given back."""
    now = platform.clock()
    with platform.engine.begin() as conn:
        this = (reservations.c.job_id == job_id) & (reservations.c.attempt == attempt) & reservations.c.released_at.is_(None)
        conn.execute(sa.update(reservations).where(this).values(released_at=now))
        conn.execute(
            sa.update(attempts)
            .where(attempts.c.job_id == job_id, attempts.c.attempt == attempt, attempts.c.ended_at.is_(None))
            .values(outcome="internal", ended_at=now)
        )
        job = conn.execute(sa.select(jobs).where(jobs.c.id == job_id)).mappings().one()
        metering.report_lost(conn, job, attempt, outcome="internal", now=now)
        metering.settle(conn, platform, job["tenant_id"], job_id, attempt)
