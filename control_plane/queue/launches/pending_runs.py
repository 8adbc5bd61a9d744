"""Which Dagster runs the present states of jobs ask for: read by the sensors, and by whoever nudges them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.queue.tables import reservations

STAGE_STATES = {"prepare": JobState.VALIDATING, "evaluate": JobState.EVALUATING}
FIRST_REASON = {"prepare": "submitted", "evaluate": "trained"}
OF_A_JOB = (jobs.c.id, jobs.c.tenant_id, jobs.c.tier, jobs.c.trace_parent)
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
    tier: str = ""
    reason: str = ""
    """Why it runs now, in a word that operators filter by: ``submitted``, ``in_order``, ``backfill``, ``trained``, ``replaced``."""
    pool: str | None = None
    num_gpus: int = 0
    attempt: int = 0
    """Of the reservation; 0 for other stages."""
    runs: int = 0
    """That were given up before it: with the attempt, what tells it from those that come after it."""
    trace_parent: str | None = None
    """Of the request that made the job."""


def due_runs(platform: Platform, stages: tuple[str, ...]) -> list[DueRun]:
    """Runs that the present states ask for, oldest job first; the caller may ask for one again, its key makes it once."""
    with platform.engine.connect() as conn:
        return [run for stage in stages for run in (_due_training(conn) if stage == "train" else _due_by_state(conn, stage))]


def _due_by_state(conn: sa.Connection, stage: str) -> list[DueRun]:
    runs = jobs.c[f"{stage}_runs"]
    query = sa.select(*OF_A_JOB, runs.label("runs")).where(jobs.c.state == STAGE_STATES[stage]).order_by(jobs.c.created_at, jobs.c.id)
    return [
        DueRun(
            stage=stage,
            tenant=r.tenant_id,
            job_id=r.id,
            run_key=f"{r.id}#{stage}{r.runs}",
            runs=r.runs,
            priority=PRIORITY.get(r.tier, 0),
            tier=r.tier,
            reason="replaced" if r.runs else FIRST_REASON[stage],
            trace_parent=r.trace_parent,
        )
        for r in conn.execute(query).all()
    ]


def training_key(job_id: str, attempt: int, runs: int) -> str:
    """Key of the run that follows an attempt, after `runs` that were given up."""
    return f"{job_id}#a{attempt}.{runs}"


def _due_training(conn: sa.Connection) -> list[DueRun]:
    """Every reservation that was not given back needs a run that ends it, also that of a job cancelled meanwhile."""
    query = (
        sa.select(*OF_A_JOB, jobs.c.train_runs.label("runs"), reservations)
        .join(reservations, reservations.c.job_id == jobs.c.id)
        .where(reservations.c.released_at.is_(None))
        .order_by(reservations.c.granted_at, jobs.c.id)
    )
    return [
        DueRun(
            stage="train",
            tenant=r.tenant_id,
            job_id=r.id,
            run_key=training_key(r.id, r.attempt, r.runs),
            runs=r.runs,
            priority=PRIORITY.get(r.tier, 0),
            tier=r.tier,
            reason="replaced" if r.runs else "backfill" if r.backfill else "in_order",
            pool=r.pool,
            num_gpus=r.num_gpus,
            attempt=r.attempt,
            trace_parent=r.trace_parent,
        )
        for r in conn.execute(query).all()
    ]


def replace_run(platform: Platform, run: DueRun) -> bool:
    """Give up on `run` (it ended, or its worker died, while the job did not move): the next round asks for another one.

    False, and nothing changes, where it is not due any more: somebody else has given up on it, or its job has moved on.
    """
    again = sa.update(jobs).where(_still_due(run)).values({_runs(run): run.runs + 1, jobs.c.heartbeat_at: platform.clock()})
    with platform.engine.begin() as conn:
        return conn.execute(again).rowcount == 1


def run_replacements(platform: Platform, run: DueRun) -> tuple[int, datetime | None] | None:
    """How often `run`'s stage was replaced, and the job's last beat; None where it is not due any more."""
    with platform.engine.connect() as conn:
        row = conn.execute(sa.select(_runs(run), jobs.c.heartbeat_at).where(_still_due(run))).one_or_none()
    return None if row is None else (int(row[0]), row[1])


def _still_due(run: DueRun) -> sa.ColumnElement[bool]:
    same = (jobs.c.id == run.job_id) & (_runs(run) == run.runs)
    if run.stage != "train":
        return same & (jobs.c.state == STAGE_STATES[run.stage])
    held = (reservations.c.job_id == jobs.c.id) & (reservations.c.attempt == run.attempt) & reservations.c.released_at.is_(None)
    return same & (jobs.c.attempt == run.attempt) & sa.exists().where(held)


def _runs(run: DueRun) -> sa.Column[int]:
    return jobs.c[f"{run.stage}_runs"]
