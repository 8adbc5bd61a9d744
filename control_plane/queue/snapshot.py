"""The policy's input: a frozen snapshot of the queue, read in a few narrow queries."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.engine import Connection
from sqlalchemy.pool import Pool as ConnectionPool

from control_plane.adapters.tables import exports, is_in_production
from control_plane.attempts.tables import attempts, checkpoints
from control_plane.capacity import maintenance
from control_plane.capacity.configured_pools import pools
from control_plane.capacity.tables import PLATFORM
from control_plane.evaluations.tables import BASE_UPDATE, evaluations, is_free
from control_plane.jobs.estimates import rules as estimates
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.queue.tables import reservations
from control_plane.quotas import service as quotas
from control_plane.tenants.tables import tenants
from core.workload import Kind
from engine import scheduler
from engine.scheduler import Pool, evaluation_class
from engine.training import SETUP_S

Rows = Mapping[str, sa.Row[Any]]
"""Rows of the waiting jobs by id: the policy's input, and what was last written about them."""


def queue_snapshot(platform: Platform) -> scheduler.Snapshot:
    """Return the present queue of all tenants, for estimates."""
    whole = platform.whole
    with whole.engine.connect() as conn:
        return read(conn, pools(whole, conn), whole.clock())[0]


def read(conn: Connection, available: Sequence[Pool], now: datetime) -> tuple[scheduler.Snapshot, Rows]:
    """Return the snapshot and the rows of the waiting jobs. Nothing is locked; callers check again before they act."""
    held = conn.execute(_held()).all()
    holding = {r.job_id for r in held}
    queued = [r for r in conn.execute(_queued()).all() if r.id not in holding]  # the end of an attempt releases its GPUs first
    judged = [r for query in (_own_evaluations(), _ordered_evaluations()) for r in conn.execute(query).all() if r.id not in holding]
    exported = [r for r in conn.execute(_ordered_exports()).all() if r.id not in holding | {e.id for e in judged}]
    judged += exported
    owners = {r.tenant_id for r in (*queued, *judged)}
    snapshot = scheduler.Snapshot(
        pools=available,
        waiting=[*map(_waiting, queued), *(_waiting_evaluation(r, available) for r in judged)],
        running=[_running(r, now, available) for r in held],
        capped=quotas.capped(conn, owners, now, num_gpus=sum(p.num_gpus for p in available)),
        suspended=_suspended(conn, owners),
        **_closed(conn, available, owners),
        used=recent_use(conn, now) if owners else {},
    )
    return snapshot, {r.id: r for r in queued}


MAY_USE_SPOT = sa.case(
    (
        sa.func.coalesce(jobs.c.request["spot"].as_boolean(), sa.false()),
        ~sa.func.coalesce(jobs.c.request["auto_promote"].as_boolean(), sa.true())
        | ~is_in_production(jobs.c.tenant_id, jobs.c.model, jobs.c.suffix),
    ),
    else_=sa.false(),
)
"""Whether a job may use spot GPUs: it asks for them, and is not to replace a model in production."""


def _queued() -> sa.Select[Any]:
    kept = (checkpoints.c.job_id == jobs.c.id) & checkpoints.c.retired_at.is_(None)
    newest = sa.select(sa.func.max(checkpoints.c.step)).where(kept).correlate(jobs).scalar_subquery()
    j = jobs.c
    return sa.select(
        j.id, j.tenant_id, j.tier, j.num_gpus, j.job_class, j.attempt, j.queued_at, j.created_at, j.waiting_since, j.waited_s,
        j.started_at, j.capped_at, j.barred_until, j.expected_s, j.setup_s, j.total_steps, j.preemptions, j.due_at, j.promise,
        j.reason, j.reason_detail, j.queue_position, j.ahead, j.expected_start_at, j.estimated_finish_at,
        MAY_USE_SPOT.label("spot"),
        sa.case((j.attempt > 0, newest), else_=None).label("saved_step"),
    ).where(j.state == JobState.QUEUED)  # fmt: skip


def _own_evaluations() -> sa.Select[Any]:
    """Evaluations of trained jobs that have no result yet."""
    j = jobs.c
    query = sa.select(
        j.id, j.tenant_id, j.tier, j.job_class, j.evaluation_s, j.evaluation_gpus,
        sa.func.coalesce(j.queued_at, j.created_at).label("since"), sa.null().label("evaluation_id"), sa.false().label("free"),
        sa.literal(Kind.EVALUATE.value).label("kind"),
    )  # fmt: skip
    return query.where(j.state == JobState.EVALUATING, ~has_result(j.id, None))


def _ordered_evaluations() -> sa.Select[Any]:
    """Evaluations that were ordered; of each job the tenant's oldest, because a job holds one reservation at most."""
    j, e = jobs.c, evaluations.c
    free = e.kind == BASE_UPDATE
    query = sa.select(
        j.id, j.tenant_id, j.tier, j.job_class, j.evaluation_s, j.evaluation_gpus, e.created_at.label("since"),
        e.id.label("evaluation_id"), free.label("free"), sa.literal(Kind.EVALUATE.value).label("kind"),
    ).join(evaluations, e.job_id == j.id)  # fmt: skip
    return query.where(e.state == "queued").ext(distinct_on(j.id)).order_by(j.id, free, e.created_at, e.id)


def _ordered_exports() -> sa.Select[Any]:
    """Exports that need a device; of each job the oldest. A job with an evaluation that waits is left to that."""
    j, e = jobs.c, exports.c
    query = sa.select(
        j.id, j.tenant_id, j.tier, j.job_class, e.expected_s.label("evaluation_s"), sa.literal(1).label("evaluation_gpus"),
        e.created_at.label("since"), e.id.label("evaluation_id"), sa.false().label("free"), sa.literal(Kind.EXPORT.value).label("kind"),
    ).join(exports, e.job_id == j.id)  # fmt: skip
    return query.where(e.status == "queued", e.expected_s.is_not(None)).ext(distinct_on(j.id)).order_by(j.id, e.created_at, e.id)


def has_result(job_id: sa.ColumnElement[str], evaluation_id: sa.ColumnElement[str] | None) -> sa.ColumnElement[bool]:
    """Whether an attempt of this evaluation has succeeded; None: of the one that follows the job's training."""
    held, ended = reservations.alias(), attempts.alias()
    r, a = held.c, ended.c
    of_it = r.evaluation_id.is_(None) if evaluation_id is None else r.evaluation_id == evaluation_id
    same = (r.job_id == job_id) & (a.job_id == r.job_id) & (a.attempt == r.attempt)
    return sa.exists().where(same, r.kind == Kind.EVALUATE, of_it, a.outcome == "succeeded")


def _held() -> sa.Select[Any]:
    """Unreleased reservations, including those of jobs cancelled meanwhile."""
    j, r, a = jobs.c, reservations.c, attempts.c
    mine = checkpoints.c.job_id == r.job_id
    saved = sa.select(sa.func.max(checkpoints.c.created_at)).where(mine, checkpoints.c.attempt == r.attempt)
    before = sa.select(sa.func.max(checkpoints.c.step)).where(mine, checkpoints.c.attempt < r.attempt)
    return (
        sa.select(
            r.job_id, r.attempt, r.pool, r.num_gpus, r.placement, r.granted_at, r.stop_asked_at, r.preempted_for, r.kind, r.evaluation_id,
            sa.func.coalesce(exports.c.expected_s, j.evaluation_s).label("evaluation_s"),
            j.tenant_id, j.tier, j.job_class, j.state, j.queued_at, j.created_at, j.waited_s, j.expected_s, j.setup_s,
            j.step, j.total_steps, j.due_at, j.preemptions, j.stop_requested, j.estimated_finish_at,
            MAY_USE_SPOT.label("spot"),
            a.started_at, a.from_step,
            saved.correlate(reservations).scalar_subquery().label("saved_at"),
            sa.case((r.attempt > 1, before.correlate(reservations).scalar_subquery()), else_=None).label("saved_step"),
        )
        .join(jobs, j.id == r.job_id)
        .outerjoin(attempts, (a.job_id == r.job_id) & (a.attempt == r.attempt))
        .outerjoin(exports, exports.c.id == r.export_id)
        .where(r.released_at.is_(None))
    )  # fmt: skip


def _waiting(r: sa.Row[Any]) -> scheduler.Waiting:
    return scheduler.Waiting(
        job_id=r.id,
        tenant=r.tenant_id,
        tier=r.tier,
        num_gpus=r.num_gpus,
        queued_at=_unix(r.queued_at or r.created_at),
        expected_s=_left_s(r),
        waiting_since=None if r.waiting_since is None else _unix(r.waiting_since),
        waited_s=r.waited_s,
        job_class=r.job_class,
        spot=r.spot,
        preemptions=r.preemptions,
        due_at=None if r.due_at is None else _unix(r.due_at),
        promise=promise_of(r.promise),
        barred_until=None if r.barred_until is None else _unix(r.barred_until),
    )


def _class_of(r: sa.Row[Any], available: Sequence[Pool]) -> str:
    """Return the class by which an evaluation, or an export of a job, is placed."""
    return evaluation_class(available, r.job_class) if r.kind == Kind.EVALUATE else str(r.job_class)


def _waiting_evaluation(r: sa.Row[Any], available: Sequence[Pool]) -> scheduler.Waiting:
    return scheduler.Waiting(
        job_id=r.id,
        tenant=r.tenant_id,
        tier=r.tier,
        num_gpus=r.evaluation_gpus,
        queued_at=_unix(r.since),
        expected_s=float(r.evaluation_s or SETUP_S),
        job_class=_class_of(r, available),
        evaluation=scheduler.Evaluation(id=r.evaluation_id, free=r.free, kind=Kind(r.kind)),
    )


def _left_s(r: sa.Row[Any]) -> float:
    """Return the seconds that a waiting job would hold its GPUs; one that resumes from a checkpoint has less to do, plus the set-up."""
    expected = float(r.expected_s or 0.0)
    if not r.saved_step or not r.total_steps:
        return expected
    left = estimates.remaining_s(
        expected_s=expected, ran_s=0.0, setup_s=_setup_s(r), from_step=r.saved_step, step=r.saved_step, total_steps=r.total_steps
    )
    return min(expected, left)


def _setup_s(r: sa.Row[Any]) -> float:
    """Start and end of an attempt, within the expected time of the whole job."""
    return min(SETUP_S if r.setup_s is None else r.setup_s, float(r.expected_s or 0.0))


RELEASE_S = 60.0
"""From the last step to free GPUs: as long as a stop's handshake (``Rules.handshake_s``), because the same happens: a save, then the
processes end."""


def _expected_end(r: sa.Row[Any], now: datetime) -> float:
    """Return the expected end: by the attempt's pace once it has made steps, until then as estimated, even if that is past.

    After its last step the attempt should end at a fixed time however long it saves; past that it overruns.
    """
    started, expected = r.started_at or r.granted_at, float(r.expected_s or 0.0)
    begun_at = r.from_step if r.from_step is not None else r.saved_step or 0
    step = r.step or 0 if r.state == JobState.RUNNING else begun_at  # until then the step belongs to an earlier attempt
    if step > begun_at and step >= (r.total_steps or step + 1):
        return _unix(r.estimated_finish_at or r.saved_at or started) + RELEASE_S
    since = now if step > begun_at else started
    return _unix(since) + estimates.remaining_s(
        expected_s=expected,
        ran_s=max(0.0, (since - started).total_seconds()),
        setup_s=_setup_s(r),
        step=step,
        from_step=begun_at,
        total_steps=r.total_steps or 0,
    )


def _running_evaluation(r: sa.Row[Any], available: Sequence[Pool]) -> scheduler.Running:
    started, expected_s = _unix(r.started_at or r.granted_at), float(r.evaluation_s or SETUP_S)
    return scheduler.Running(
        job_id=r.job_id,
        pool=r.pool,
        num_gpus=r.num_gpus,
        expected_end=started + expected_s,
        tier=r.tier,
        tenant=r.tenant_id,
        placement=placement_of(r.placement),
        started_at=started,
        expected_s=expected_s,
        job_class=_class_of(r, available),
        stoppable=False,
        stopping=r.stop_asked_at is not None or (r.kind == Kind.EVALUATE and r.evaluation_id is None and r.state != JobState.EVALUATING),
    )


def _running(r: sa.Row[Any], now: datetime, available: Sequence[Pool]) -> scheduler.Running:
    if r.kind != Kind.TRAIN:
        return _running_evaluation(r, available)
    return scheduler.Running(
        job_id=r.job_id,
        pool=r.pool,
        num_gpus=r.num_gpus,
        expected_end=_expected_end(r, now),
        tier=r.tier,
        tenant=r.tenant_id,
        placement=placement_of(r.placement),
        started_at=_unix(r.started_at or r.granted_at),
        expected_s=float(r.expected_s or 0.0),
        saved_at=None if r.saved_at is None else _unix(r.saved_at),
        job_class=r.job_class,
        queued_at=_unix(r.queued_at or r.created_at),
        waited_s=r.waited_s,
        due_at=None if r.due_at is None else _unix(r.due_at),
        preemptions=r.preemptions,
        spot=r.spot,
        stopping=r.stop_requested is not None or r.stop_asked_at is not None or r.state not in HOLDING,
        stopping_for=r.preempted_for,
        stopping_since=None if r.stop_asked_at is None else _unix(r.stop_asked_at),
    )


HOLDING = frozenset({JobState.PROVISIONING, JobState.RUNNING})
"""States of a job that continues training; in any other state its reservation is about to be released."""


def placement_of(stored: Sequence[Sequence[Any]]) -> scheduler.Placement:
    """Read a stored placement: ``[["node-3", 8], ...]``."""
    return tuple((str(node), int(gpus)) for node, gpus in stored)


def promise_of(stored: Mapping[str, Any] | None) -> scheduler.Reservation | None:
    """Read the reservation stored with a waiting job."""
    if not stored:
        return None
    return scheduler.Reservation(
        start=float(stored["start"]), pool=stored["pool"], placement=placement_of(stored["placement"]), made_at=float(stored["made_at"])
    )


def _unix(moment: datetime) -> float:
    return moment.timestamp()


def _closed(conn: Connection, available: Sequence[Pool], tenant_ids: Collection[str]) -> dict[str, dict[str, str]]:
    """Return the pools and the tenants under maintenance, with the operators' message."""
    closed = {m.scope: m.words for m in maintenance.list_all(conn)}
    pools = {p.name: message for p in available if (message := closed.get(PLATFORM) or closed.get(f"pool:{p.name}"))}
    return {"closed": pools, "closed_to": {t: closed[f"tenant:{t}"] for t in tenant_ids if f"tenant:{t}" in closed}}


def _suspended(conn: Connection, tenant_ids: Collection[str]) -> dict[str, str]:
    """Return those of these tenants that are suspended, with the reason in words."""
    if not tenant_ids:
        return {}
    query = sa.select(tenants).where(tenants.c.id.in_(tenant_ids), tenants.c.suspended_at.is_not(None))
    reported = "the tenant {} is suspended since {:%Y-%m-%d %H:%M} UTC: {}. The job can start once an operator lifts the suspension"
    return {r.id: reported.format(r.id, r.suspended_at, r.suspended_reason) for r in conn.execute(query)}


WINDOW = timedelta(hours=24)
"""One day: a tenant that trains every evening is measured by the evening before."""
HALF_LIFE_S = 6 * 3600.0
"""A quarter of the window: use that leaves it counted for a sixteenth, so no share jumps when that happens."""
SEEN_FOR = timedelta(seconds=10)
"""Called every cycle; in ten seconds a decayed day changes by less than a thousandth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    at: datetime
    used: dict[str, float]


_SEEN: WeakKeyDictionary[ConnectionPool, _Seen] = WeakKeyDictionary()
"""By database: the connection pool."""


def recent_use(conn: Connection, now: datetime) -> dict[str, float]:
    """Return GPU-seconds held by each tenant within :data:`WINDOW`, without those that the platform pays; those :data:`HALF_LIFE_S` ago
    count half."""
    seen = _SEEN.get(conn.engine.pool)
    if seen is None or not timedelta(0) <= now - seen.at < SEEN_FOR:
        seen = _SEEN[conn.engine.pool] = _Seen(at=now, used=_summed(conn, now))
    return seen.used


def _summed(conn: Connection, now: datetime) -> dict[str, float]:
    tau = HALF_LIFE_S / math.log(2.0)
    moment = sa.literal(now, sa.DateTime(timezone=True))

    def weight(at: sa.ColumnElement[datetime]) -> sa.ColumnElement[float]:
        ago_s = sa.cast(sa.func.extract("epoch", moment - sa.func.least(at, moment)), sa.Float)
        return sa.func.exp(-ago_s / tau)

    begins = sa.func.greatest(reservations.c.granted_at, moment - WINDOW)
    held = reservations.c.num_gpus * tau * (weight(sa.func.coalesce(reservations.c.released_at, moment)) - weight(begins))
    recent = sa.or_(reservations.c.released_at.is_(None), reservations.c.released_at > now - WINDOW)
    query = (
        sa.select(jobs.c.tenant_id, sa.func.sum(held))
        .join(jobs, jobs.c.id == reservations.c.job_id)
        .where(recent, ~is_free(reservations.c.evaluation_id))
        .group_by(jobs.c.tenant_id)
    )
    return {tenant: float(seconds) for tenant, seconds in conn.execute(query) if seconds > 0}
