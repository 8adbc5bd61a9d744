"""The queue as tenants and operators see it. A tenant's view names no job, tenant or node of another tenant."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.adapters.tables import exports
from control_plane.capacity.configured_pools import pools
from control_plane.capacity.occupancy import Held, PoolUse, occupancy
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.platform.records import columns, many, one_or_none
from control_plane.queue.reservations import overdue_releases
from control_plane.queue.snapshot import has_result, promise_of, recent_use
from control_plane.queue.status import schemas
from control_plane.queue.tables import reservations, scheduler_state
from core.workload import Kind
from engine.scheduler import Pool, Reservation
from ft_client.queue_messages import waiting_line

HOUR_S = 3600.0
Q = TypeVar("Q", bound=schemas.QueuedJob)


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuedJob:
    id: str
    tenant: str
    model: str
    tier: str
    num_gpus: int
    job_class: str
    spot: bool
    position: int | None
    """None until a scheduling cycle has seen it."""
    reason: str | None
    reason_detail: str | None
    queued_at: datetime | None
    waited_s: float
    """Over all stays in the queue."""
    expected_s: float | None
    estimated_start: datetime | None
    estimated_finish: datetime | None
    due_at: datetime | None
    ahead: Mapping[str, Any] | None
    """Jobs ahead of it, as stored: counts by tier, and the GPUs that they wait for."""
    promise: Mapping[str, Any] | None
    """Its reservation, as stored."""
    preemptions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingEvaluation:
    """A trained job without GPUs for its evaluation."""

    id: str
    model: str
    tier: str
    num_gpus: int
    reason: str | None
    reason_detail: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningJob:
    """A job that holds GPUs."""

    id: str
    tenant: str
    model: str
    tier: str
    state: str
    attempt: int
    pool: str
    num_gpus: int
    placement: tuple[tuple[str, int], ...]
    kind: Kind
    backfill: bool
    since: datetime
    estimated_end: datetime | None
    step: int | None
    total_steps: int | None
    evaluation: Mapping[str, Any] | None
    """Progress of the evaluation that follows training, as stored, while it runs."""
    preemptions: int
    stop_asked_at: datetime | None
    """When it was asked to save a checkpoint and release its GPUs to another job."""
    stopped_for: str | None
    """The job that it makes room for; shown to operators only."""

    @property
    def num_nodes(self) -> int:
        return max(1, len(self.placement))

    @property
    def stopping(self) -> bool:
        return self.stop_asked_at is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """The last scheduling cycle, and the counters of all."""

    last_round_at: datetime | None = None
    round_s: float | None = None
    rounds: int = 0
    starts: int = 0
    backfills: int = 0
    preemptions: int = 0
    promises: int = 0
    slipped: int = 0


def of_tenant(platform: Platform, tenant: str) -> schemas.Queue:
    """Return the tenant's own jobs in the queue, and sums over all tenants."""
    now, mine = platform.clock(), jobs.c.tenant_id == tenant
    with platform.engine.connect() as conn:
        waiting, own = _waiting(conn, now, mine), own_ahead(conn, tenant)
        running, unevaluated = _running(conn, mine, now), _waiting_evaluations(conn, mine)
        preparing = conn.execute(sa.select(sa.func.count()).where(mine, jobs.c.state == JobState.VALIDATING)).scalar_one()
    with platform.whole.engine.connect() as conn:
        by_tier, in_use, last = _counted(conn, jobs.c.tier), occupied(platform, conn), last_round(conn)
    length = sum(by_tier.values())
    return schemas.Queue.of(
        last,
        length=length,
        by_tier=by_tier,
        preparing=preparing,
        waiting=[_described(schemas.QueuedJob, j, now, length, ahead=ahead(j.ahead, own.get(j.id, 0))) for j in waiting],
        waiting_evaluations=[schemas.WaitingEvaluation.of(j) for j in unevaluated],
        running=[schemas.PlacedJob.of(j) for j in running],
        pools=[schemas.PoolSums.of(use.pool, use, **_sums(use)) for use in in_use],
    )


def of_all(platform: Platform, *, limit: int | None = None) -> schemas.OperatorQueue:
    """Return everything, for operators; at most `limit` waiting jobs, in order of position, with those last that no cycle has seen yet."""
    now = platform.clock()
    with platform.whole.engine.connect() as conn:
        running, available = _running(conn, sa.true(), now), pools(platform, conn)
        by_tier, waiting = _counted(conn, jobs.c.tier), _waiting(conn, now, sa.true(), limit=limit)
        reserved, widest = _reserved(conn), widest_waiting(conn, available)
        tenants, overdue, last = _tenants(conn, running, now), overdue_releases(conn, now), last_round(conn)
    held = [Held(job_id=r.id, pool=r.pool, num_gpus=r.num_gpus, placement=r.placement) for r in running]
    length = sum(by_tier.values())
    return schemas.OperatorQueue(
        length=length,
        by_tier=by_tier,
        waiting=[
            _described(schemas.OperatorQueuedJob, j, now, length, reservation=_reservation(j.promise, schemas.OperatorReservation))
            for j in waiting
        ],
        running=[schemas.OperatorPlacedJob.of(r, overrun_s=_overrun_s(r, now)) for r in running],
        pools=[_operators_pool(use, reserved, widest.get(use.pool.name, 0)) for use in occupancy(available, held)],
        tenants=tenants,
        scheduler=schemas.SchedulerState.of(last, last_round_s=last.round_s, reservations=last.promises),
        overdue=[schemas.OverdueRelease.of(o, age_s=round(o.age_s, 1)) for o in overdue],
    )


def ahead(stored: Mapping[str, Any] | None, own: int = 0) -> schemas.Ahead | None:
    """Return the jobs ahead, from the job's row; `own`: waiting jobs of its tenant ahead of it."""
    if stored is None:
        return None
    counts = stored.get("jobs") or {}
    return schemas.Ahead(jobs=counts, num_gpus=stored.get("num_gpus") or 0, yours=min(own, sum(counts.values())))


def reservation(stored: Mapping[str, Any] | None) -> schemas.Reservation | None:
    """Return a waiting job's reservation, from its row, without node names."""
    return _reservation(stored, schemas.Reservation)


def _reservation(stored: Mapping[str, Any] | None, kind: type[schemas.Reservation]) -> schemas.Reservation | None:
    found = promise_of(stored)
    return None if found is None else kind.of(found, num_nodes=len(found.placement))


def _described(kind: type[Q], job: QueuedJob, now: datetime, length: int, **more: Any) -> Q:
    kept = {"ahead": ahead(job.ahead), "reservation": reservation(job.promise), **more}
    shown = kind.of(job, summary="", waited_s=round(job.waited_s, 1), **kept)
    shown.summary = waiting_line(shown.model_dump(), now=now.timestamp(), length=length)
    return shown


def _overrun_s(job: RunningJob, now: datetime) -> float:
    return 0.0 if job.estimated_end is None else round(max(0.0, (now - job.estimated_end).total_seconds()), 1)


def _sums(use: PoolUse) -> dict[str, Any]:
    return {"used_gpus": use.used, "draining_gpus": use.draining, "free_gpus": use.free, "takes": sorted(use.pool.takes)}


def _operators_pool(use: PoolUse, reserved: Mapping[str, Reservation], widest: int) -> schemas.OperatorPool:
    """`reserved`: reservations by waiting job; `widest`: GPUs of the widest waiting job that the pool takes."""
    promised = defaultdict[str, list[str]](list)
    for job_id, kept in reserved.items():
        for node, _ in kept.placement if kept.pool == use.pool.name else ():
            promised[node].append(job_id)
    nodes = [schemas.NodeState.of(n.node, n, free_gpus=n.free, reserved_for=promised[n.node.name]) for n in use.nodes]
    return schemas.OperatorPool.of(use.pool, use, **_sums(use), unusable_gpus=use.apart(widest), nodes=nodes)


def widest_waiting(conn: Connection, available: Sequence[Pool]) -> dict[str, int]:
    """Return, by pool, the GPUs of the widest waiting job that could use it; pools without waiting jobs are left out."""
    kinds = conn.execute(sa.select(jobs.c.tier, jobs.c.job_class, jobs.c.num_gpus).where(jobs.c.state == JobState.QUEUED).distinct()).all()
    widest = {
        p.name: max((k.num_gpus for k in kinds if p.accepts(k.job_class) and k.num_gpus <= p.widest(k.tier)), default=0) for p in available
    }
    return {name: gpus for name, gpus in widest.items() if gpus}


def occupied(platform: Platform, conn: Connection) -> list[PoolUse]:
    """Return every pool with what is held in it."""
    held = sa.select(*columns(reservations, Held)).where(reservations.c.released_at.is_(None))
    return occupancy(pools(platform, conn), many(conn, held, Held))


def last_round(conn: Connection) -> Round:
    """Return when the last cycle ran, and the counters of all cycles."""
    query = sa.select(*columns(scheduler_state, Round)).where(scheduler_state.c.id == 1)
    return one_or_none(conn, query, Round) or Round()


def own_ahead(conn: Connection, tenant: str) -> dict[str, int]:
    """Return, by waiting job of the tenant that a cycle has seen, how many of its other jobs are ahead."""
    mine = sa.select(jobs.c.id).where(jobs.c.tenant_id == tenant, jobs.c.state == JobState.QUEUED, jobs.c.queue_position.is_not(None))
    return {job_id: before for before, job_id in enumerate(conn.execute(mine.order_by(jobs.c.queue_position, jobs.c.id)).scalars())}


def _counted(conn: Connection, column: sa.Column[str]) -> dict[str, int]:
    """Count the waiting jobs by `column`."""
    return dict(conn.execute(sa.select(column, sa.func.count()).where(jobs.c.state == JobState.QUEUED).group_by(column)).all())


def _reserved(conn: Connection) -> dict[str, Reservation]:
    promised = sa.select(jobs.c.id, jobs.c.promise).where(jobs.c.state == JobState.QUEUED, sa.func.jsonb_typeof(jobs.c.promise) == "object")
    rows = conn.execute(promised.order_by(jobs.c.queue_position.asc().nulls_last(), jobs.c.id)).all()
    return {r.id: kept for r in rows if (kept := promise_of(r.promise)) is not None}


def waited(now: datetime) -> sa.ColumnElement[float]:
    """Seconds that a waiting job has waited over all of its stays in the queue."""
    moment = sa.literal(now, sa.DateTime(timezone=True))
    stay = sa.func.extract("epoch", moment - sa.func.coalesce(jobs.c.waiting_since, jobs.c.queued_at, moment))
    return jobs.c.waited_s + sa.cast(sa.func.greatest(stay, 0), sa.Float)


def _waiting(conn: Connection, now: datetime, which: sa.ColumnElement[bool], *, limit: int | None = None) -> list[QueuedJob]:
    j = jobs.c
    query = sa.select(
        j.id, j.tenant_id.label("tenant"), j.model, j.tier, j.num_gpus, j.job_class, j.queue_position.label("position"), j.reason,
        j.reason_detail, j.queued_at, waited(now).label("waited_s"), j.expected_s, j.expected_start_at.label("estimated_start"),
        (j.estimated_finish_at + _seconds(sa.func.coalesce(j.evaluation_s, 0.0))).label("estimated_finish"), j.due_at, j.ahead, j.promise,
        j.preemptions,
        sa.func.coalesce(j.request["spot"].as_boolean(), sa.false()).label("spot"),
    )  # fmt: skip
    order = (j.queue_position.asc().nulls_last(), j.queued_at, j.id)
    return many(conn, query.where(which, j.state == JobState.QUEUED).order_by(*order).limit(limit), QueuedJob)


def _seconds(number: sa.ColumnElement[float]) -> sa.ColumnElement[timedelta]:
    return sa.func.make_interval(0, 0, 0, 0, 0, 0, number)


def _waiting_evaluations(conn: Connection, which: sa.ColumnElement[bool]) -> list[WaitingEvaluation]:
    j, r = jobs.c, reservations.c
    held = sa.exists().where(r.job_id == j.id, r.released_at.is_(None))
    query = sa.select(j.id, j.model, j.tier, j.evaluation_gpus.label("num_gpus"), j.reason, j.reason_detail)
    query = query.where(which, j.state == JobState.EVALUATING, ~has_result(j.id, None), ~held)
    return many(conn, query.order_by(j.created_at, j.id), WaitingEvaluation)


def _running(conn: Connection, which: sa.ColumnElement[bool], now: datetime) -> list[RunningJob]:
    j, r = jobs.c, reservations.c
    exported_s = sa.select(exports.c.expected_s).where(exports.c.id == r.export_id).scalar_subquery()
    takes_s = sa.case((r.kind == Kind.EVALUATE, j.evaluation_s), (r.kind == Kind.EXPORT, exported_s), else_=j.expected_s)
    ends = sa.case((r.kind == Kind.TRAIN, j.estimated_finish_at))
    end = sa.func.coalesce(ends, r.granted_at + _seconds(takes_s))
    trains = r.kind == Kind.TRAIN
    query = sa.select(
        j.id, j.tenant_id.label("tenant"), j.model, j.tier, j.state, r.attempt, r.pool, r.num_gpus, r.placement, r.kind, r.backfill,
        r.granted_at.label("since"), end.label("estimated_end"), sa.case((trains, j.step)).label("step"),
        sa.case((trains, j.total_steps)).label("total_steps"), j.preemptions, r.stop_asked_at, r.preempted_for.label("stopped_for"),
        sa.case(((r.kind == Kind.EVALUATE) & (j.state == JobState.EVALUATING), j.evaluation)).label("evaluation"),
    ).join(reservations, j.id == r.job_id)  # fmt: skip
    found = many(conn, query.where(which, r.released_at.is_(None)).order_by(r.granted_at, r.job_id), RunningJob)
    return [_measured_end(job, now) for job in found]


def _measured_end(job: RunningJob, now: datetime) -> RunningJob:
    """Replace the planned end of an evaluation by the one that it reports."""
    left_s = None if job.evaluation is None else job.evaluation.get("eta_s")
    return job if left_s is None else replace(job, estimated_end=now + timedelta(seconds=left_s))


def _tenants(conn: Connection, running: Sequence[RunningJob], now: datetime) -> list[schemas.TenantShare]:
    """Return the shares of tenants that wait, hold GPUs or used some recently. Shares are equal, and who used more waits longer."""
    waiting, used_s = _counted(conn, jobs.c.tenant_id), recent_use(conn, now)
    num, gpus = Counter(r.tenant for r in running), Counter[str]()
    for r in running:
        gpus[r.tenant] += r.num_gpus
    return [
        schemas.TenantShare(
            tenant=t, waiting=waiting.get(t, 0), running=num[t], num_gpus=gpus[t], used_gpu_hours=used_s.get(t, 0.0) / HOUR_S
        )
        for t in sorted({*waiting, *num, *used_s})
    ]
