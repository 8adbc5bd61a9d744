"""The queue's hands: read the snapshot, ask the policy, write reservations; and say which runs are due."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from control_plane import scheduler
from control_plane.jobs import JobState
from control_plane.pools import Pool, local_pool
from control_plane.service import metering, quotas
from control_plane.service.platform import Platform
from control_plane.service.transition import transition
from control_plane.tables import attempts, jobs, reservations, tenants

SCHEDULER_LOCK = 0x66745F73
"""Advisory lock ("ft_s"): one scheduling decision at a time, however many schedulers run."""

STAGE_STATES = {"prepare": JobState.VALIDATING, "evaluate": JobState.EVALUATING}
PRIORITY = {"premium": 10, "standard": 5, "free": 0}
"""``dagster/priority`` is int(str): words and fractions silently become 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DueRun:
    """A Dagster run that must exist for a job in its present state."""

    stage: str
    """``prepare``, ``train`` or ``evaluate``: the name of the Dagster job."""
    tenant: str
    job_id: str
    run_key: str
    """``<job>#<stage><n>``: asking again with the same key starts nothing."""
    priority: int
    pool: str | None = None
    num_gpus: int = 0
    attempt: int = 0
    """Of the reservation; 0 for other stages."""
    trace_parent: str | None = None
    """Of the request that made the job."""


def pools(platform: Platform) -> list[Pool]:
    """Pools of this installation."""
    return [local_pool(platform.settings.local_gpus, premium=platform.settings.premium_gpus)]


def place(platform: Platform) -> list[scheduler.Decision]:
    """One scheduling round, in one transaction: reservations for what starts, a reason and a position for what waits."""
    now = platform.clock()
    with platform.engine.begin() as conn:
        conn.execute(sa.select(sa.func.pg_advisory_xact_lock(SCHEDULER_LOCK)))
        snapshot, rows = _snapshot(conn, pools(platform), now)
        decisions = scheduler.schedule(snapshot, now=now.timestamp())
        for decision in decisions:
            if isinstance(decision, scheduler.Start):
                _reserve(conn, rows[decision.job_id], decision, now)
            else:
                _explain(conn, rows[decision.job_id], decision, capped=rows[decision.job_id].tenant_id in snapshot.capped, now=now)
    return decisions


def queue_snapshot(platform: Platform) -> scheduler.Snapshot:
    """The queue as it is now, of all tenants and without a lock on it: for estimates."""
    with platform.whole.engine.connect() as conn:
        return _snapshot(conn, pools(platform), platform.clock(), lock=False)[0]


def _snapshot(
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


def due_runs(platform: Platform, stages: tuple[str, ...]) -> list[DueRun]:
    """Runs that the present states ask for, oldest job first; the caller may ask for one again, its key makes it once."""
    with platform.engine.connect() as conn:
        return [run for stage in stages for run in (_due_training(conn) if stage == "train" else _due_by_state(conn, stage))]


def _due_by_state(conn: sa.Connection, stage: str) -> list[DueRun]:
    rows = conn.execute(sa.select(jobs).where(jobs.c.state == STAGE_STATES[stage]).order_by(jobs.c.created_at, jobs.c.id)).all()
    return [
        DueRun(
            stage=stage,
            tenant=r.tenant_id,
            job_id=r.id,
            run_key=f"{r.id}#{stage}{getattr(r, f'{stage}_runs')}",
            priority=PRIORITY.get(r.tier, 0),
            trace_parent=r.trace_parent,
        )
        for r in rows
    ]


def _due_training(conn: sa.Connection) -> list[DueRun]:
    """Every reservation that was not given back needs a run that ends it, also that of a job cancelled meanwhile."""
    query = (
        sa.select(jobs, reservations.c.pool, reservations.c.attempt.label("held"), reservations.c.num_gpus.label("held_gpus"))
        .join(reservations, reservations.c.job_id == jobs.c.id)
        .where(reservations.c.released_at.is_(None))
        .order_by(reservations.c.granted_at, jobs.c.id)
    )
    return [
        DueRun(
            stage="train",
            tenant=r.tenant_id,
            job_id=r.id,
            run_key=f"{r.id}#a{r.held}.{r.train_runs}",
            priority=PRIORITY.get(r.tier, 0),
            pool=r.pool,
            num_gpus=r.held_gpus,
            attempt=r.held,
            trace_parent=r.trace_parent,
        )
        for r in conn.execute(query).all()
    ]


def replace_run(platform: Platform, run: DueRun) -> None:
    """Give up on `run` (it ended, or its worker died, while the job did not move): the next round asks for another one."""
    column = jobs.c[f"{run.stage}_runs"]
    with platform.engine.begin() as conn:
        conn.execute(sa.update(jobs).where(jobs.c.id == run.job_id).values({column: column + 1, jobs.c.heartbeat_at: platform.clock()}))


def run_replacements(platform: Platform, run: DueRun) -> tuple[int, datetime | None]:
    """How often `run`'s stage was replaced, and the job's last beat."""
    with platform.engine.connect() as conn:
        row = conn.execute(sa.select(jobs.c[f"{run.stage}_runs"], jobs.c.heartbeat_at).where(jobs.c.id == run.job_id)).one()
    return int(row[0]), row[1]


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
