"""The Dagster runs that jobs need in their present state; read by the sensors and the queue listener."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection

from control_plane.adapters.tables import exports
from control_plane.attempts.tables import attempts
from control_plane.evaluations.tables import evaluations
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.platform.job_states import FINAL, JobState
from control_plane.platform.records import many
from control_plane.queue.snapshot import has_result
from control_plane.queue.tables import reservations, run_launches
from core.workload import Kind

FIRST_REASON = {"prepare": "submitted", "evaluate": "trained"}
PRIORITY = {"premium": 10, "standard": 5, "free": 0}
"""``dagster/priority`` is int(str): words and fractions silently become 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DueRun:
    """A Dagster run that must exist for a job in its present state."""

    stage: str
    """``prepare``, ``train`` or ``evaluate``: the name of the Dagster job."""
    tenant: str
    job_id: str
    tier: str
    runs: int = 0
    """Runs before this one; together with the attempt it makes the key unique."""
    followed: int = 0
    """Of `runs`, those that ended with their attempt of the evaluation: they did not die."""
    attempt: int = 0
    """Number of the reservation; 0 without one."""
    pool: str | None = None
    num_gpus: int = 0
    """GPUs of the reservation; 0 without one."""
    backfill: bool = False
    trace_parent: str | None = None
    """Request id of the submission."""

    @property
    def run_key(self) -> str:
        """``<job>#<stage><n>``: requesting a run with the same key again starts nothing."""
        return training_key(self.job_id, self.attempt, self.runs) if self.stage == "train" else f"{self.job_id}#{self.stage}{self.runs}"

    @property
    def died(self) -> int:
        """How many runs of the stage were given up because they did not move the job."""
        return self.runs - self.followed

    @property
    def priority(self) -> int:
        return PRIORITY.get(self.tier, 0)

    @property
    def reason(self) -> str:
        """Why it runs now, in one word that operators filter by: ``submitted``, ``in_order``, ``backfill``, ``trained``, ``replaced``."""
        if self.runs:
            return "replaced"
        return FIRST_REASON.get(self.stage, "backfill" if self.backfill else "in_order")


def training_key(job_id: str, attempt: int, runs: int) -> str:
    """Return the key of the run that follows an attempt after `runs` were given up."""
    return f"{job_id}#a{attempt}.{runs}"


def due_runs(platform: Platform, stages: tuple[str, ...]) -> list[DueRun]:
    """Return the runs that jobs need now, oldest job first. A run may be returned again until it exists; its key makes it unique."""
    with platform.engine.connect() as conn:
        return [run for stage in stages for run in many(conn, DUE[stage](), DueRun)]


EVALUATION_OPEN = evaluations.c.state.in_(("queued", "running"))
EXPORT_WAITS = (exports.c.status == "queued") & exports.c.expected_s.is_not(None)
"""It waits for a device."""


def any_open(platform: Platform) -> bool:
    """Whether a job, a reservation, an evaluation or an export is open, so that something may become due with time, or a run may die."""
    open_job, held = jobs.c.state.not_in([state.value for state in FINAL]), reservations.c.released_at.is_(None)
    return _exists(platform, open_job, held, EVALUATION_OPEN, EXPORT_WAITS)


def evaluation_open(platform: Platform) -> bool:
    return _exists(platform, EVALUATION_OPEN)


def _exists(platform: Platform, *any_of: sa.ColumnElement[bool]) -> bool:
    with platform.engine.connect() as conn:
        return bool(conn.scalar(sa.select(sa.or_(*(sa.exists().where(each) for each in any_of)))))


def _of_a_job(stage: str) -> sa.Select[Any]:
    runs, j = jobs.c[f"{stage}_runs"].label("runs"), jobs.c
    return sa.select(sa.literal(stage).label("stage"), j.tenant_id.label("tenant"), j.id.label("job_id"), j.tier, j.trace_parent, runs)


def _due_preparation() -> sa.Select[Any]:
    return _of_a_job("prepare").where(jobs.c.state == JobState.VALIDATING).order_by(jobs.c.created_at, jobs.c.id)


def _due_training() -> sa.Select[Any]:
    """Every unreleased reservation needs a run that ends it, even if its job was cancelled meanwhile."""
    r = reservations.c
    query = _of_a_job("train").add_columns(r.attempt, r.pool, r.num_gpus, r.backfill).join(reservations, r.job_id == jobs.c.id)
    return query.where(r.released_at.is_(None), r.kind == Kind.TRAIN).order_by(r.granted_at, jobs.c.id)


def _due_evaluation() -> sa.Select[Any]:
    """An evaluation that holds a reservation needs a run that ends it; one that has its result, a run that concludes the job."""
    r, none = reservations.c, sa.literal(0)
    held = (r.job_id == jobs.c.id) & _evaluates(reservations)
    found = sa.func.coalesce(r.attempt, none).label("attempt"), r.pool, sa.func.coalesce(r.num_gpus, none).label("num_gpus")
    query = _of_a_job("evaluate").add_columns(*found, sa.func.coalesce(r.backfill, sa.false()).label("backfill"), _followed())
    return query.outerjoin(reservations, held).where(evaluation_due()).order_by(jobs.c.created_at, jobs.c.id)


def _followed() -> sa.Label[int]:
    """Count the attempts of the evaluation that follows a job's training that ended without a result: each was followed by another."""
    of, a = reservations.alias(), attempts.c
    ended = sa.select(sa.func.count()).join_from(of, attempts, (a.job_id == of.c.job_id) & (a.attempt == of.c.attempt))
    mine = (of.c.job_id == jobs.c.id, of.c.kind == Kind.EVALUATE, of.c.evaluation_id.is_(None))
    return ended.where(*mine, a.ended_at.is_not(None), a.outcome != "succeeded").correlate(jobs).scalar_subquery().label("followed")


def _evaluates(of: sa.FromClause) -> sa.ColumnElement[bool]:
    """Select the unreleased reservation of the evaluation that follows a job's training."""
    return sa.and_(of.c.released_at.is_(None), of.c.kind == Kind.EVALUATE, of.c.evaluation_id.is_(None))


def evaluation_due() -> sa.ColumnElement[bool]:
    """Whether the evaluation that follows a job's training needs a run now. Both parts are found by index; an OR of them reads all jobs."""
    of, ended = reservations.alias(), jobs.alias()
    held = sa.select(of.c.job_id).where(_evaluates(of))
    answered = sa.select(ended.c.id).where(ended.c.state == JobState.EVALUATING, has_result(ended.c.id, None))
    return jobs.c.id.in_(sa.union_all(held, answered))


def order_due() -> sa.ColumnElement[bool]:
    """Whether an ordered evaluation needs a run now: one that ends it if it holds a reservation, one that records the verdict if it has its
    result."""
    held = sa.exists().where(reservations.c.evaluation_id == evaluations.c.id, reservations.c.released_at.is_(None))
    return held | ((evaluations.c.state == "running") & has_result(evaluations.c.job_id, evaluations.c.id))


def order_key(evaluation_id: str, runs: int) -> str:
    """Return the key of the present run of an ordered evaluation, the `runs`-th that was started for it."""
    return f"{evaluation_id}#{runs - 1}"


DUE = {"prepare": _due_preparation, "train": _due_training, "evaluate": _due_evaluation}
"""By stage: the runs that jobs need."""


def replace_run(platform: Platform, run: DueRun) -> bool:
    """Give up on `run` because it ended, or its worker died, without moving the job; the next cycle requests a new one.

    Returns False and changes nothing if the run is no longer due: another process gave up on it, or its job moved on.
    """
    again = sa.update(jobs).where(_still_due(run)).values({_runs(run): run.runs + 1, jobs.c.heartbeat_at: platform.clock()})
    with platform.engine.begin() as conn:
        return conn.execute(again).rowcount == 1


def run_replacements(platform: Platform, run: DueRun) -> tuple[int, datetime | None] | None:
    """Return how often the stage of `run` was replaced, and the job's last heartbeat; None if the run is no longer due."""
    with platform.engine.connect() as conn:
        row = conn.execute(sa.select(_runs(run), jobs.c.heartbeat_at).where(_still_due(run))).one_or_none()
    return None if row is None else (int(row[0]), row[1])


def _still_due(run: DueRun) -> sa.ColumnElement[bool]:
    same = (jobs.c.id == run.job_id) & (_runs(run) == run.runs)
    if run.stage != "train":
        return same & (evaluation_due() if run.stage == "evaluate" else jobs.c.state == JobState.VALIDATING)
    held = (reservations.c.job_id == jobs.c.id) & (reservations.c.attempt == run.attempt) & reservations.c.released_at.is_(None)
    return same & (jobs.c.attempt == run.attempt) & sa.exists().where(held)


def _runs(run: DueRun) -> sa.Column[int]:
    return jobs.c[f"{run.stage}_runs"]


CLAIM_S = 30.0
"""Longer than a sensor tick: 25 requests of 0.3 s each plus the wait for the daemon. If a claimant dies, its runs wait this long."""


def claim(platform: Platform, due: Sequence[DueRun], *, by: str) -> list[DueRun]:
    """Return those of `due` that `by` may now launch."""
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
    """Release claims of `by` that led to no run, so that the next process may launch them at once."""
    this = run_launches.c.run_key.in_(run_keys) & (run_launches.c.claimed_by == by) & run_launches.c.run_id.is_(None)
    with platform.engine.begin() as conn:
        conn.execute(sa.delete(run_launches).where(this))


def unbound(platform: Platform, due: Sequence[DueRun]) -> list[DueRun]:
    """Return those of `due` that have no run yet."""
    query = sa.select(run_launches.c.run_key).where(
        run_launches.c.run_key.in_([d.run_key for d in due]), run_launches.c.run_id.is_not(None)
    )
    with platform.engine.connect() as conn:
        bound = set(conn.execute(query).scalars())
    return [d for d in due if d.run_key not in bound]


def bind(conn: Connection, run_key: str, job_id: str, run_id: str, *, by: str) -> str | None:
    """Record `run_id` as the run of the key, whoever claimed it; returns the id of another run that already has the key."""
    statement = insert(run_launches).values(run_key=run_key, job_id=job_id, run_id=run_id, claimed_by=by, claimed_at=sa.func.now())
    bound = statement.on_conflict_do_update(
        index_elements=["run_key"],
        set_={"run_id": run_id, "claimed_by": by},
        where=run_launches.c.run_id.is_(None) | (run_launches.c.run_id == run_id),
    )
    if conn.execute(bound.returning(run_launches.c.run_id)).first() is not None:
        return None
    return str(conn.execute(sa.select(run_launches.c.run_id).where(run_launches.c.run_key == run_key)).scalar_one())


MAX_KEYS = 10_000
"""Partition keys kept: listing this many takes 0.3 s, ten times as many ten times as long."""
SETTLED = timedelta(hours=1)
"""Grace period: a job's last run may still write after the job has ended."""


class Keyed(NamedTuple):
    """A job whose partition key is to be deleted."""

    tenant: str
    job_id: str


def retirable(platform: Platform, *, limit: int, max_keys: int = MAX_KEYS) -> list[Keyed]:
    """Return at most `limit` jobs whose partition keys are to be deleted, those that ended first first."""
    now, after = platform.clock(), timedelta(days=platform.settings.partition_days)
    with platform.engine.connect() as conn:
        due = _ended(conn, now - max(after, SETTLED), limit)
        surplus = _keys(conn) - len(due) - max_keys
        if surplus <= 0 or len(due) == limit:
            return due
        return _ended(conn, now - SETTLED, min(limit, len(due) + surplus))


def retired(platform: Platform, job_ids: Collection[str]) -> None:
    """Record that the partition keys of these jobs were deleted."""
    with platform.engine.begin() as conn:
        conn.execute(sa.update(jobs).where(jobs.c.id.in_(job_ids)).values(partition_retired_at=platform.clock()))


def returned(platform: Platform, job_ids: Collection[str]) -> None:
    """Record that the partition keys of these jobs are needed again by a run."""
    this = jobs.c.id.in_(job_ids) & jobs.c.partition_retired_at.is_not(None)
    with platform.engine.begin() as conn:
        conn.execute(sa.update(jobs).where(this).values(partition_retired_at=None))


def _keys(conn: Connection) -> int:
    """Return jobs whose partition key exists or will be created."""
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
"""Time limit of `prepare`: 1M examples at 2,300 tokenized rows per CPU second take 7 minutes; reading and storing them takes the rest."""
LEAST_PREPARE = 4
"""Each run needs 0.5 GiB on a small machine; with two per tenant, one computes while the other reads and writes."""


def prepare_limit(num_gpus: int, *, override: int = 0) -> int:
    """Return how many preparations run at once in an installation with `num_gpus`; a nonzero `override` replaces the computed limit."""
    return override or max(LEAST_PREPARE, _staffed(num_gpus * JOBS_PER_GPU_HOUR * PREPARE_H))


def per_tenant(limit: int) -> int:
    """Return how many of the `limit` concurrent runs one tenant may use."""
    return max(1, limit // 2)


def _staffed(load: float) -> int:
    return math.ceil(load + 2 * math.sqrt(load))
