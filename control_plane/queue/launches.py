"""Which Dagster runs the present states of jobs ask for: read by the sensors, and by whoever nudges them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection

from control_plane.evaluations.tables import evaluations
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.platform.job_states import FINAL, JobState
from control_plane.queue.tables import reservations, run_launches

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


CLAIM_S = 30.0
"""Longer than a tick of 25 requests at 0.3 s each with its wait for the daemon; a claimant that died costs this much."""


def claim(platform: Platform, due: Sequence[DueRun], *, by: str) -> list[DueRun]:
    """Those of `due` whose run `by` may now ask for."""
    if not due:
        return []
    now = platform.clock()
    rows = [{"run_key": d.run_key, "job_id": d.job_id, "claimed_by": by, "claimed_at": now} for d in due]
    statement = insert(run_launches).values(rows)
    over = run_launches.c.run_id.is_(None) & (run_launches.c.claimed_at < now - timedelta(seconds=CLAIM_S))
    mine = statement.on_conflict_do_update(
        index_elements=["run_key"],
        set_={"claimed_by": statement.excluded.claimed_by, "claimed_at": statement.excluded.claimed_at},
        where=over,
    ).returning(run_launches.c.run_key)
    with platform.engine.begin() as conn:
        won = set(conn.execute(mine).scalars())
    return [d for d in due if d.run_key in won]


def give_up(platform: Platform, run_keys: Collection[str], *, by: str) -> None:
    """Let go of claims of `by` from which no run came: the next who looks may ask for it at once."""
    this = run_launches.c.run_key.in_(run_keys) & (run_launches.c.claimed_by == by) & run_launches.c.run_id.is_(None)
    with platform.engine.begin() as conn:
        conn.execute(sa.delete(run_launches).where(this))


def unbound(platform: Platform, due: Sequence[DueRun]) -> list[DueRun]:
    """Those of `due` that have no run yet."""
    query = sa.select(run_launches.c.run_key).where(
        run_launches.c.run_key.in_([d.run_key for d in due]), run_launches.c.run_id.is_not(None)
    )
    with platform.engine.connect() as conn:
        bound = set(conn.execute(query).scalars())
    return [d for d in due if d.run_key not in bound]


def bind(conn: Connection, run_key: str, job_id: str, run_id: str, *, by: str) -> str | None:
    """Make `run_id` the run of the key, whoever claimed it; the id of the run that has it already, if that is another."""
    statement = insert(run_launches).values(run_key=run_key, job_id=job_id, run_id=run_id, claimed_by=by, claimed_at=sa.func.now())
    bound = statement.on_conflict_do_update(
        index_elements=["run_key"],
        set_={"run_id": run_id, "claimed_by": by},
        where=run_launches.c.run_id.is_(None) | (run_launches.c.run_id == run_id),
    )
    if conn.execute(bound.returning(run_launches.c.run_id)).first() is not None:
        return None
    return str(conn.execute(sa.select(run_launches.c.run_id).where(run_launches.c.run_key == run_key)).scalar_one())


def asked_by(platform: Platform) -> Mapping[str, int]:
    """How many runs were asked for by whom."""
    query = sa.select(run_launches.c.claimed_by, sa.func.count()).where(run_launches.c.run_id.is_not(None))
    with platform.engine.connect() as conn:
        return {str(who): int(count) for who, count in conn.execute(query.group_by(run_launches.c.claimed_by))}


MAX_KEYS = 10_000
"""Listing takes 0.3 s at so many, and ten times as long at ten times as many."""
SETTLED = timedelta(hours=1)
"""After a job's end its last run may still write."""


class Keyed(NamedTuple):
    """A job whose key is to go."""

    tenant: str
    job_id: str


def retirable(platform: Platform, *, limit: int, max_keys: int = MAX_KEYS) -> list[Keyed]:
    """At most `limit` jobs whose keys are to go, the first that ended first."""
    now, after = platform.clock(), timedelta(days=platform.settings.partition_days)
    with platform.engine.connect() as conn:
        due = _ended(conn, now - max(after, SETTLED), limit)
        surplus = _keys(conn) - len(due) - max_keys
        if surplus <= 0 or len(due) == limit:
            return due
        return _ended(conn, now - SETTLED, min(limit, len(due) + surplus))


def retired(platform: Platform, job_ids: Collection[str]) -> None:
    """The keys of these jobs are gone."""
    with platform.engine.begin() as conn:
        conn.execute(sa.update(jobs).where(jobs.c.id.in_(job_ids)).values(partition_retired_at=platform.clock()))


def returned(platform: Platform, job_ids: Collection[str]) -> None:
    """The keys of these jobs are asked for again: a run needs them."""
    this = jobs.c.id.in_(job_ids) & jobs.c.partition_retired_at.is_not(None)
    with platform.engine.begin() as conn:
        conn.execute(sa.update(jobs).where(this).values(partition_retired_at=None))


def _keys(conn: Connection) -> int:
    """Jobs whose key is there, or will be."""
    return int(conn.execute(sa.select(sa.func.count()).where(jobs.c.partition_retired_at.is_(None))).scalar_one())


def _ended(conn: Connection, before: datetime, limit: int) -> list[Keyed]:
    evaluated = sa.exists().where(evaluations.c.job_id == jobs.c.id, evaluations.c.state.in_(("queued", "running")))
    query = (
        sa.select(jobs.c.tenant_id, jobs.c.id)
        .where(
            jobs.c.finished_at < before,
            jobs.c.partition_retired_at.is_(None),
            jobs.c.state.in_([s.value for s in FINAL]),
            ~evaluated,
        )
        .order_by(jobs.c.finished_at, jobs.c.id)
        .limit(limit)
    )
    return [Keyed(r.tenant_id, r.id) for r in conn.execute(query)]


JOBS_PER_GPU_HOUR = 500 / 24 / 325
PREPARE_H = 1 / 6
"""1M examples at 2,300 tokenized rows per CPU second take 7 minutes; reading and storing them the rest."""
EVALUATE_H = 1 / 2
"""What the evaluation of a 7B model may take."""
LEAST_PREPARE = 4
"""0.5 GiB each on a small machine; two of one tenant: one computes while the other reads and writes."""
LEAST_EVALUATE = 2
"""The fewest of which a tenant leaves one to others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLimits:
    """Runs at once, of all tenants."""

    prepare: int
    evaluate: int
    """Evaluations of jobs and later ones of registered adapters together."""


def limits(num_gpus: int, *, prepare: int = 0, evaluate: int = 0) -> RunLimits:
    """Limits of an installation with `num_gpus`; `prepare` and `evaluate` replace what follows from it, 0 does not."""
    return RunLimits(
        prepare=prepare or max(LEAST_PREPARE, _staffed(num_gpus * JOBS_PER_GPU_HOUR * PREPARE_H)),
        evaluate=evaluate or max(LEAST_EVALUATE, _staffed(num_gpus * JOBS_PER_GPU_HOUR * EVALUATE_H)),
    )


def per_tenant(limit: int) -> int:
    """Runs of one tenant at once, of `limit` in all."""
    return max(1, limit // 2)


def _staffed(load: float) -> int:
    return math.ceil(load + 2 * math.sqrt(load))
