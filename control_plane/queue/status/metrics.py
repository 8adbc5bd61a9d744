"""Metrics of the queue: waits and their reasons, reservations kept and missed, and use and fragmentation of the pools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal, get_args

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.attempts.tables import attempts
from control_plane.capacity.occupancy import PoolUse
from control_plane.capacity.tables import PLATFORM, node_drains, node_health
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.queue.reservations import overdue_releases
from control_plane.queue.status import missed_starts, view
from control_plane.queue.tables import reservations

WAITS_OVER = timedelta(hours=1)
"""Window of the start delays reported."""
UNREAD_AFTER = timedelta(minutes=5)
"""Ten rounds of the worker; after as long without a sample, Prometheus returns none either."""
QUANTILES = (0.5, 0.95)
NodeState = Literal["ready", "draining", "drained"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolGauges:
    gpus: int
    """GPUs of ready nodes."""
    used: int
    """Of these, GPUs that jobs hold."""
    free: int
    largest_free: int
    """Most GPUs free on one node."""
    unusable: int
    """Free GPUs that would suffice for the widest waiting job of the pool if they were together."""
    draining: int
    """GPUs that jobs still hold on nodes that are not ready; Kueue's quota is `gpus` plus these."""
    nodes: Mapping[NodeState, int]
    sick_nodes: int
    """Nodes that the platform drained."""
    unmonitored_nodes: int
    """Nodes whose GPUs were not read for :data:`UNREAD_AFTER`, if they are to be read at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantGauges:
    """A tenant with jobs that wait, hold GPUs, or started within :data:`WAITS_OVER`."""

    used_gpus: int = 0
    waiting_gpus: int = 0
    oldest_wait_s: float | None = None
    waits_s: Mapping[float, float] = field(default_factory=dict)
    """Time from queue to GPUs by quantile, over :data:`WAITS_OVER`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueGauges:
    waiting: Mapping[tuple[str, str], int]
    """Waiting jobs by tier and reason."""
    waiting_gpus: Mapping[str, int]
    """GPUs that they wait for, by tier."""
    oldest_wait_s: Mapping[str, float]
    """Longest wait by tier, over all stays in the queue."""
    ages_s: Mapping[tuple[str, float], float]
    """Waits of queued jobs by tier and quantile."""
    waits_s: Mapping[tuple[str, float], float]
    """Time from queue to GPUs by tier and quantile, over :data:`WAITS_OVER`."""
    promised_waiting: Mapping[str, int]
    """Jobs by tier that have waited for their first start longer than the tier promises, and could start if GPUs were free."""
    promised_late: Mapping[str, int]
    """Jobs by tier that started later than promised, since the beginning."""
    promised_starts: Mapping[str, int]
    """Jobs by tier that started under a promise, late or not, since the beginning."""
    tenants: Mapping[str, TenantGauges]
    pools: Mapping[str, PoolGauges]
    lost_gpu_s: float
    """GPU-seconds of repeated work, since the beginning."""
    overdue: Mapping[str, int]
    """Late reservations by kind: `start` or `stop`."""
    round: view.Round
    round_age_s: float | None


def read(conn: Connection, platform: Platform, now: datetime) -> QueueGauges:
    """Read all metrics on one connection."""
    waited = view.waited(now)
    by_reason = sa.select(jobs.c.tier, jobs.c.reason, sa.func.count(), sa.func.sum(jobs.c.num_gpus), sa.func.max(waited))
    rows = conn.execute(by_reason.where(jobs.c.state == JobState.QUEUED).group_by(jobs.c.tier, jobs.c.reason)).all()
    last, found = view.last_round(conn), [o.kind for o in overdue_releases(conn, now)]
    return QueueGauges(
        waiting={(tier, reason or "New"): int(n) for tier, reason, n, _, _ in rows},
        waiting_gpus={t: sum(int(gpus) for tier, _, _, gpus, _ in rows if tier == t) for t in {r.tier for r in rows}},
        oldest_wait_s={t: max(float(oldest) for tier, _, _, _, oldest in rows if tier == t) for t in {r.tier for r in rows}},
        ages_s=_quantiles(conn, jobs.c.tier, waited, jobs.c.state == JobState.QUEUED),
        waits_s=_waits(conn, jobs.c.tier, now - WAITS_OVER),
        promised_waiting=missed_starts.num_waiting(conn, now),
        promised_late=missed_starts.num_late(conn),
        promised_starts=missed_starts.num_started(conn),
        tenants=_tenants(conn, now),
        pools=_pools(conn, platform, now),
        lost_gpu_s=float(
            conn.execute(sa.select(sa.func.coalesce(sa.func.sum(attempts.c.lost_s), 0)).where(attempts.c.lost_s > 0)).scalar_one()
        ),
        overdue={kind: found.count(kind) for kind in ("start", "stop")},
        round=last,
        round_age_s=None if last.last_round_at is None else max(0.0, (now - last.last_round_at).total_seconds()),
    )


def _quantiles(
    conn: Connection, by: sa.Column[str], waited: sa.ColumnElement[Any], *which: sa.ColumnElement[bool]
) -> dict[tuple[str, float], float]:
    """Return quantiles of `waited` by a column of jobs, or of their reservations."""
    columns = [sa.func.percentile_cont(q).within_group(waited) for q in QUANTILES]
    rows = conn.execute(sa.select(by, *columns).where(*which).group_by(by)).all()
    return {(value, q): float(v) for value, *values in rows for q, v in zip(QUANTILES, values, strict=True)}


def _waits(conn: Connection, by: sa.Column[str], since: datetime) -> dict[tuple[str, float], float]:
    """First attempts only: a job that resumes keeps its earlier place."""
    r = reservations.c
    first = jobs.c.id == r.job_id, r.attempt == 1, r.granted_at >= since, jobs.c.queued_at <= r.granted_at
    return _quantiles(conn, by, sa.func.extract("epoch", r.granted_at - jobs.c.queued_at), *first)


def _tenants(conn: Connection, now: datetime) -> dict[str, TenantGauges]:
    """Reads jobs that wait and reservations that are held or new, never all jobs of a tenant."""
    t = jobs.c.tenant_id
    queued = sa.select(t, sa.func.sum(jobs.c.num_gpus), sa.func.max(view.waited(now))).where(jobs.c.state == JobState.QUEUED)
    waiting = {tenant: (int(gpus), float(oldest)) for tenant, gpus, oldest in conn.execute(queued.group_by(t)).all()}
    held = sa.select(t, sa.func.sum(reservations.c.num_gpus)).join(reservations, jobs.c.id == reservations.c.job_id)
    used = {tenant: int(gpus) for tenant, gpus in conn.execute(held.where(reservations.c.released_at.is_(None)).group_by(t)).all()}
    waits = _waits(conn, t, now - WAITS_OVER)
    return {
        tenant: TenantGauges(
            used_gpus=used.get(tenant, 0),
            waiting_gpus=waiting.get(tenant, (0, None))[0],
            oldest_wait_s=waiting.get(tenant, (0, None))[1],
            waits_s={q: s for (name, q), s in waits.items() if name == tenant},
        )
        for tenant in {*waiting, *used, *(name for name, _ in waits)}
    }


def _pools(conn: Connection, platform: Platform, now: datetime) -> dict[str, PoolGauges]:
    in_use = view.occupied(platform, conn)
    sick = set(conn.execute(sa.select(node_drains.c.node).where(node_drains.c.drained_by == PLATFORM)).scalars())
    read = set(conn.execute(sa.select(node_health.c.node).where(node_health.c.read_at > now - UNREAD_AFTER)).scalars())
    widest = view.widest_waiting(conn, [u.pool for u in in_use])
    return {
        u.pool.name: PoolGauges(
            gpus=u.pool.num_gpus,
            used=u.used,
            free=u.free,
            largest_free=u.largest_free,
            unusable=u.apart(widest.get(u.pool.name, 0)),
            draining=u.draining,
            nodes=_by_state(u),
            sick_nodes=sum(n.node.name in sick for n in u.nodes),
            unmonitored_nodes=sum(n.node.name not in read for n in u.nodes) if platform.settings.prometheus_url else 0,
        )
        for u in in_use
    }


def _by_state(use: PoolUse) -> dict[NodeState, int]:
    states: list[NodeState] = ["ready" if n.node.ready else "draining" if n.jobs else "drained" for n in use.nodes]
    return {state: states.count(state) for state in get_args(NodeState)}
