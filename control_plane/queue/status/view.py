"""The queue as tenants and operators see it. A tenant's view names no job, tenant or node of another tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.capacity.configured_pools import pools
from control_plane.capacity.occupancy import Held, PoolUse, occupancy
from control_plane.capacity.pools import Pool
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.queue.reservations import overdue_releases
from control_plane.queue.snapshot import recent_use
from control_plane.queue.tables import reservations, scheduler_state

WAITING_COLUMNS: tuple[sa.ColumnElement[Any], ...] = (
    jobs.c.id, jobs.c.tenant_id, jobs.c.model, jobs.c.tier, jobs.c.num_gpus, jobs.c.job_class, jobs.c.queue_position, jobs.c.reason,
    jobs.c.reason_detail, jobs.c.queued_at, jobs.c.waiting_since, jobs.c.waited_s, jobs.c.expected_s, jobs.c.expected_start_at,
    jobs.c.estimated_finish_at, jobs.c.due_at, jobs.c.ahead, jobs.c.promise, jobs.c.preemptions,
    sa.func.coalesce(jobs.c.request["spot"].as_boolean(), sa.false()).label("spot"),
)  # fmt: skip
HELD_COLUMNS: tuple[sa.ColumnElement[Any], ...] = (
    reservations.c.job_id, reservations.c.attempt, reservations.c.pool, reservations.c.num_gpus, reservations.c.placement,
    reservations.c.backfill, reservations.c.preempted_for, reservations.c.stop_asked_at, reservations.c.granted_at,
    jobs.c.tenant_id, jobs.c.model, jobs.c.tier, jobs.c.state, jobs.c.step, jobs.c.total_steps, jobs.c.expected_s,
    jobs.c.estimated_finish_at, jobs.c.preemptions,
)  # fmt: skip

STOPPED_WITHIN_S = 120.0
"""From the request to stop: the trainer checks every half second, saving may take 25 s, and the workload is killed after 30 s; four
times that is a fault."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserved:
    """GPUs reserved for a waiting job from `start` on."""

    start: float
    pool: str
    placement: Sequence[tuple[str, int]]
    made_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Ahead:
    """Jobs ahead of a job, as counts."""

    jobs: Mapping[str, int]
    num_gpus: int
    yours: int = 0
    """How many of them belong to the tenant that asks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuedJob:
    job_id: str
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
    ahead: Ahead | None
    reserved: Reserved | None
    preemptions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningJob:
    """A job that holds GPUs."""

    job_id: str
    tenant: str
    model: str
    tier: str
    state: str
    attempt: int
    pool: str
    num_gpus: int
    placement: Sequence[tuple[str, int]]
    backfill: bool
    since: datetime
    expected_end: datetime | None
    step: int | None
    total_steps: int | None
    preemptions: int
    stop_asked_at: datetime | None
    """When it was asked to save a checkpoint and release its GPUs to another job."""
    stopped_for: str | None
    """The job that it makes room for; shown to operators only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overdue:
    """A reservation whose workload has not started in time, or was asked to stop and still holds its GPUs."""

    job_id: str
    attempt: int
    pool: str
    num_gpus: int
    kind: Literal["start", "stop"]
    age_s: float
    """Seconds since it was granted, or asked to stop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """Counters of the scheduling cycles."""

    last_at: datetime | None
    took_s: float | None
    queued: int | None
    counts: Mapping[str, int]
    """Keys: rounds, starts, backfills, preemptions, promises, slipped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantQueue:
    length: int
    """Number of waiting jobs of all tenants."""
    by_tier: Mapping[str, int]
    preparing: int
    """Jobs of the tenant whose data is being prepared; they are not in the queue yet."""
    waiting: Sequence[QueuedJob]
    running: Sequence[RunningJob]
    pools: Sequence[PoolUse]
    last_round_at: datetime | None
    now: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeQueue:
    by_tier: Mapping[str, int]
    waiting: Sequence[QueuedJob]
    """In order of position; jobs that no cycle has seen yet come last. Only the first ones if a limit was given."""
    waiting_of: Mapping[str, int]
    """Number of waiting jobs by tenant."""
    reserved: Mapping[str, Reserved]
    """Reservations by waiting job."""
    running: Sequence[RunningJob]
    pools: Sequence[PoolUse]
    used_gpu_s: Mapping[str, float]
    """Recent use by tenant: shares are equal, and who used more waits longer."""
    widest: Mapping[str, int]
    """By pool, GPUs of the widest waiting job that it takes."""
    overdue: Sequence[Overdue]
    round: Round
    now: datetime

    @property
    def length(self) -> int:
        return sum(self.by_tier.values())


def of_tenant(platform: Platform, tenant: str) -> TenantQueue:
    """Return the tenant's own jobs in the queue, and sums over all tenants."""
    now = platform.clock()
    with platform.engine.connect() as conn:
        mine = jobs.c.tenant_id == tenant
        waiting = _waiting(conn, now, mine, own=own_ahead(conn, tenant))
        running = _running(conn, mine)
        preparing = conn.execute(sa.select(sa.func.count()).where(mine, jobs.c.state == JobState.VALIDATING)).scalar_one()
    with platform.whole.engine.connect() as conn:
        by_tier = _by_tier(conn)
        in_use = occupied(platform, conn)
        last = last_round(conn)
    return TenantQueue(
        length=sum(by_tier.values()),
        by_tier=by_tier,
        preparing=preparing,
        waiting=waiting,
        running=running,
        pools=in_use,
        last_round_at=last.last_at,
        now=now,
    )


def of_all(platform: Platform, *, limit: int | None = None) -> WholeQueue:
    """Return everything, for operators; at most `limit` waiting jobs."""
    now = platform.clock()
    with platform.whole.engine.connect() as conn:
        running = _running(conn, sa.true())
        available = pools(platform, conn)
        return WholeQueue(
            by_tier=_by_tier(conn),
            waiting=_waiting(conn, now, sa.true(), limit=limit),
            waiting_of=_waiting_of(conn),
            reserved=_reserved(conn),
            running=running,
            pools=occupancy(available, [_holding(r) for r in running]),
            used_gpu_s=recent_use(conn, now),
            widest=widest_waiting(conn, available),
            overdue=overdue(conn, now),
            round=last_round(conn),
            now=now,
        )


def widest_waiting(conn: Connection, available: Sequence[Pool]) -> dict[str, int]:
    """Return, by pool, the GPUs of the widest waiting job that could use it; pools without waiting jobs are left out."""
    kinds = conn.execute(sa.select(jobs.c.tier, jobs.c.job_class, jobs.c.num_gpus).where(jobs.c.state == JobState.QUEUED).distinct()).all()
    widest = {
        p.name: max((k.num_gpus for k in kinds if p.accepts(k.job_class) and k.num_gpus <= p.widest(k.tier)), default=0) for p in available
    }
    return {name: gpus for name, gpus in widest.items() if gpus}


def overdue(conn: Connection, now: datetime) -> list[Overdue]:
    """Return reservations whose workload has not started in time, then those that were asked to stop and have not."""
    late = overdue_releases(conn, now)
    unstarted = [Overdue(job_id=o.job_id, attempt=o.attempt, pool=o.pool, num_gpus=o.num_gpus, kind="start", age_s=o.age_s) for o in late]
    requested = sa.select(reservations).where(
        reservations.c.released_at.is_(None), reservations.c.stop_asked_at < now - timedelta(seconds=STOPPED_WITHIN_S)
    )
    return unstarted + [
        Overdue(
            job_id=r.job_id,
            attempt=r.attempt,
            pool=r.pool,
            num_gpus=r.num_gpus,
            kind="stop",
            age_s=(now - r.stop_asked_at).total_seconds(),
        )
        for r in conn.execute(requested.order_by(reservations.c.stop_asked_at, reservations.c.job_id))
    ]


def occupied(platform: Platform, conn: Connection) -> list[PoolUse]:
    """Return every pool with what is held in it."""
    return occupancy(pools(platform, conn), _held(conn))


def last_round(conn: Connection) -> Round:
    """Return when the last cycle ran, and the counters of all cycles."""
    row = conn.execute(sa.select(scheduler_state).where(scheduler_state.c.id == 1)).mappings().one_or_none()
    names = ("rounds", "starts", "backfills", "preemptions", "promises", "slipped")
    if row is None:
        return Round(last_at=None, took_s=None, queued=None, counts=dict.fromkeys(names, 0))
    return Round(last_at=row["last_round_at"], took_s=row["round_s"], queued=row["queued"], counts={n: int(row[n]) for n in names})


def ahead_of(stored: Mapping[str, Any] | None, own: int = 0) -> Ahead | None:
    """Read the jobs ahead from a job's row; `own`: waiting jobs of its tenant ahead of it."""
    if stored is None:
        return None
    counts = {tier: int(n) for tier, n in (stored.get("jobs") or {}).items()}
    return Ahead(jobs=counts, num_gpus=int(stored.get("num_gpus") or 0), yours=min(own, sum(counts.values())))


def own_ahead(conn: Connection, tenant: str) -> dict[str, int]:
    """Return, by waiting job of the tenant that a cycle has seen, how many of its other jobs are ahead."""
    mine = sa.select(jobs.c.id).where(jobs.c.tenant_id == tenant, jobs.c.state == JobState.QUEUED, jobs.c.queue_position.is_not(None))
    return {job_id: before for before, job_id in enumerate(conn.execute(mine.order_by(jobs.c.queue_position, jobs.c.id)).scalars())}


def reserved_of(stored: Mapping[str, Any] | None) -> Reserved | None:
    """Read a job's reservation from its row."""
    if stored is None:
        return None
    placement = [(str(node), int(gpus)) for node, gpus in stored.get("placement") or ()]
    return Reserved(
        start=float(stored["start"]), pool=str(stored["pool"]), placement=placement, made_at=float(stored.get("made_at") or stored["start"])
    )


def _by_tier(conn: Connection) -> dict[str, int]:
    counted = sa.select(jobs.c.tier, sa.func.count()).where(jobs.c.state == JobState.QUEUED).group_by(jobs.c.tier)
    return {tier: int(n) for tier, n in conn.execute(counted).all()}


def _waiting_of(conn: Connection) -> dict[str, int]:
    counted = sa.select(jobs.c.tenant_id, sa.func.count()).where(jobs.c.state == JobState.QUEUED).group_by(jobs.c.tenant_id)
    return {tenant: int(n) for tenant, n in conn.execute(counted).all()}


def _reserved(conn: Connection) -> dict[str, Reserved]:
    promised = sa.select(jobs.c.id, jobs.c.promise).where(jobs.c.state == JobState.QUEUED, sa.func.jsonb_typeof(jobs.c.promise) == "object")
    rows = conn.execute(promised.order_by(jobs.c.queue_position.asc().nulls_last(), jobs.c.id)).all()
    return {r.id: kept for r in rows if (kept := reserved_of(r.promise)) is not None}


def _waiting(
    conn: Connection, now: datetime, which: sa.ColumnElement[bool], *, limit: int | None = None, own: Mapping[str, int] | None = None
) -> list[QueuedJob]:
    query = sa.select(*WAITING_COLUMNS).where(which, jobs.c.state == JobState.QUEUED)
    order = (jobs.c.queue_position.asc().nulls_last(), jobs.c.queued_at, jobs.c.id)
    return [_queued(r, now, (own or {}).get(r.id, 0)) for r in conn.execute(query.order_by(*order).limit(limit))]


def _queued(r: sa.Row[Any], now: datetime, own: int) -> QueuedJob:
    since = r.waiting_since or r.queued_at or now
    return QueuedJob(
        job_id=r.id,
        tenant=r.tenant_id,
        model=r.model,
        tier=r.tier,
        num_gpus=r.num_gpus,
        job_class=r.job_class,
        spot=r.spot,
        position=r.queue_position,
        reason=r.reason,
        reason_detail=r.reason_detail,
        queued_at=r.queued_at,
        waited_s=r.waited_s + max(0.0, (now - since).total_seconds()),
        expected_s=r.expected_s,
        estimated_start=r.expected_start_at,
        estimated_finish=r.estimated_finish_at,
        due_at=r.due_at,
        ahead=ahead_of(r.ahead, own),
        reserved=reserved_of(r.promise),
        preemptions=r.preemptions,
    )


def _running(conn: Connection, which: sa.ColumnElement[bool]) -> list[RunningJob]:
    held = sa.select(*HELD_COLUMNS).join(jobs, jobs.c.id == reservations.c.job_id)
    query = held.where(which, reservations.c.released_at.is_(None)).order_by(reservations.c.granted_at, reservations.c.job_id)
    return [_run(r) for r in conn.execute(query)]


def _run(r: sa.Row[Any]) -> RunningJob:
    end = r.estimated_finish_at or (None if r.expected_s is None else r.granted_at + timedelta(seconds=r.expected_s))
    return RunningJob(
        job_id=r.job_id,
        tenant=r.tenant_id,
        model=r.model,
        tier=r.tier,
        state=r.state,
        attempt=r.attempt,
        pool=r.pool,
        num_gpus=r.num_gpus,
        placement=[(str(node), int(gpus)) for node, gpus in r.placement],
        backfill=r.backfill,
        since=r.granted_at,
        expected_end=end,
        step=r.step,
        total_steps=r.total_steps,
        preemptions=r.preemptions,
        stop_asked_at=r.stop_asked_at,
        stopped_for=r.preempted_for,
    )


def _held(conn: Connection) -> list[Held]:
    """All held GPUs."""
    columns = (reservations.c.job_id, reservations.c.pool, reservations.c.num_gpus, reservations.c.placement)
    query = sa.select(*columns).where(reservations.c.released_at.is_(None))
    return [
        Held(job_id=r.job_id, pool=r.pool, num_gpus=r.num_gpus, placement=[(str(n), int(g)) for n, g in r.placement])
        for r in conn.execute(query)
    ]


def _holding(r: RunningJob) -> Held:
    return Held(job_id=r.job_id, pool=r.pool, num_gpus=r.num_gpus, placement=r.placement)


def tenants_of(queue: WholeQueue) -> dict[str, tuple[int, int, int]]:
    """Return, by tenant, waiting jobs, jobs that hold GPUs, and those GPUs."""
    running, gpus = Counter[str](), Counter[str]()
    for r in queue.running:
        running[r.tenant] += 1
        gpus[r.tenant] += r.num_gpus
    return {t: (queue.waiting_of.get(t, 0), running[t], gpus[t]) for t in sorted({*queue.waiting_of, *running, *queue.used_gpu_s})}
