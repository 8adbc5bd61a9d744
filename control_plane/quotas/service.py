"""GPU-hours of tenants: used, running and held, and the holds of admitted jobs.

A hold is the whole expected time of a job, written in the transaction that admits it, under the lock of the tenant's row; time that the job
has already used is subtracted when it is counted. Only :func:`_time_used` knows where used time is stored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection
from sqlalchemy.pool import Pool

from control_plane.attempts.tables import attempts
from control_plane.billing.tables import ledger_entries
from control_plane.evaluations.tables import is_free
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.platform.job_states import FINAL, JobState
from control_plane.platform.records import columns, many, one_or_none
from control_plane.queue.tables import reservations
from control_plane.quotas import rules as quotas
from control_plane.quotas.rules import HARD_CAP_REACHED, HOUR_S, Month, Refusal, Standing, month_of
from control_plane.quotas.tables import quota_holds
from control_plane.tenants.rules import Tenant
from control_plane.tenants.service import find_tenant
from control_plane.tenants.tables import TENANT, tenants

METERING_LAG = timedelta(hours=1)
"""How long an ended attempt counts while it is missing in the ledger; one that is never entered is not billed."""
SEEN_FOR = timedelta(minutes=1)
"""How long a cached sum of used time may show that a cap is far away; late entries and refunds are visible by then."""
CAPPED_FOR = timedelta(seconds=5)
"""The same for a reached cap: after a refund, jobs start within this time; after a higher cap, at once."""
LEAST_REST_S = 60.0
"""Remaining time, per GPU, assumed for a job that has used more than it held."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobQuota:
    """What one job means for its tenant's month."""

    tenant: Tenant
    month: Month
    standing: Standing
    """Excluding the job."""
    gpu_seconds: float
    """Expected GPU-seconds of the job, including what it has used."""
    counted: bool
    """True if based on counted tokens, False for a first estimate."""

    def to_dict(self) -> Mapping[str, Any]:
        over = quotas.overage_s(self.tenant, self.standing, self.gpu_seconds)
        return {
            **month_in_hours(self.tenant, self.month, self.standing),
            "job_gpu_hours": in_hours(self.gpu_seconds),
            "counted": self.counted,
            "fits": quotas.fits(self.tenant, self.standing, self.gpu_seconds) is None,
            "goes_into_overage": over > 0,
            "overage_gpu_hours": in_hours(over),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleasedHold:
    """The hold of a paused job, and its progress."""

    gpu_seconds: float
    counted: bool
    step: int | None
    total_steps: int | None
    num_gpus: int
    evaluation_s: float | None
    evaluation_gpus: int
    used_s: float

    @property
    def rest_s(self) -> float:
        """What the job still needs: by its pace if it has made steps, else its hold less what it has used."""
        step, total = self.step or 0, self.total_steps or 0
        if self.used_s > 0 and 0 < step <= total:
            return self.used_s * (total - step) / step + (self.evaluation_s or 0.0) * self.evaluation_gpus
        return max(self.gpu_seconds - self.used_s, LEAST_REST_S * self.num_gpus)


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantQuota:
    """A tenant's limits and current use."""

    tenant: Tenant
    month: Month
    standing: Standing
    jobs_in_flight: int
    paused_for_cap: int


def in_hours(gpu_seconds: float) -> float:
    return round(gpu_seconds / HOUR_S, 6)


def month_in_hours(tenant: Tenant, month: Month, at: Standing) -> Mapping[str, Any]:
    """Return a month's limits and use in GPU-hours, by their names in the API."""
    left = quotas.left_s(tenant, at)
    return {
        "month": month.name,
        "soft_gpu_hours": tenant.soft_gpu_hours,
        "hard_gpu_hours": tenant.hard_gpu_hours,
        "used_gpu_hours": in_hours(at.used_s),
        "held_gpu_hours": in_hours(at.held_s),
        "left_gpu_hours": None if left is None else in_hours(left),
        "on_hard_cap": quotas.NO_HARD_CAP if tenant.hard_gpu_hours is None else quotas.ON_HARD_CAP,
    }


def standing(conn: Connection, tenant: str, now: datetime, *, without: str | None = None) -> Standing:
    """Return the tenant's use in the month of `now`; `without`: a job whose hold and use are left out."""
    return standings(conn, [tenant], now, without=without)[tenant]


def standings(conn: Connection, tenant_ids: Collection[str], now: datetime, *, without: str | None = None) -> dict[str, Standing]:
    """The same for several tenants, in one query."""
    month = month_of(now)
    given = {"tenants": list(tenant_ids), "now": now, "begins": month.begins, "ends": month.ends} | (
        {"without": without} if without else {}
    )
    found: dict[str, dict[str, float]] = {tenant: {} for tenant in tenant_ids}
    for tenant, part, seconds in conn.execute(_time_by_tenant(without is not None), given):
        found[tenant][part] = float(seconds or 0.0)
    return {tenant: Standing(**parts) for tenant, parts in found.items()}


def left(platform: Platform, tenant_ids: Collection[str]) -> dict[str, float | None]:
    """Return the GPU-seconds that the hard caps of these tenants leave for further jobs; None if there is no cap."""
    if not tenant_ids:
        return {}
    with platform.engine.connect() as conn:
        owners = many(conn, _tenants(tenant_ids), Tenant)
        at = standings(conn, tenant_ids, platform.clock())
    return {owner.id: quotas.left_s(owner, at[owner.id]) for owner in owners}


def tenant_quota(platform: Platform, tenant: str) -> TenantQuota:
    """Return a tenant's limits and current use."""
    now = platform.clock()
    live = jobs.c.state.not_in([s.value for s in FINAL])
    capped = (jobs.c.state == JobState.PAUSED.value) & (jobs.c.reason == HARD_CAP_REACHED)
    counts = sa.select(sa.func.count(), sa.func.count().filter(capped)).where(jobs.c.tenant_id == tenant, live)
    with platform.engine.connect() as conn:
        owner = find_tenant(conn, tenant)
        in_flight, paused = conn.execute(counts).one()
        now_at = standing(conn, tenant, now)
    return TenantQuota(tenant=owner, month=month_of(now), standing=now_at, jobs_in_flight=in_flight, paused_for_cap=paused)


def of_job(platform: Platform, tenant: str, job_id: str) -> JobQuota:
    """Return what an admitted job means for the month; nothing more if it is trained, or paused for the cap."""
    held = sa.select(quota_holds.c.gpu_seconds, quota_holds.c.counted)
    with platform.engine.connect() as conn:
        row = conn.execute(held.where(quota_holds.c.job_id == job_id, quota_holds.c.released_at.is_(None))).one_or_none()
    gpu_seconds, counted = row or (0.0, False)
    return of_estimate(platform, tenant, gpu_seconds, counted=counted, without=job_id)


def of_estimate(platform: Platform, tenant: str, gpu_seconds: float, *, counted: bool, without: str | None = None) -> JobQuota:
    """Return what a job of `gpu_seconds` would mean for the month; `without`: the job, if it exists."""
    now = platform.clock()
    with platform.engine.connect() as conn:
        owner, others = find_tenant(conn, tenant), standing(conn, tenant, now, without=without)
    return JobQuota(tenant=owner, month=month_of(now), standing=others, gpu_seconds=gpu_seconds, counted=counted)


def hold(conn: Connection, tenant: str, job_id: str, gpu_seconds: float, *, counted: bool, now: datetime) -> None:
    """Set the job's hold to `gpu_seconds`, replacing the previous one; call with the tenant locked."""
    values = {"job_id": job_id, "tenant_id": tenant, "gpu_seconds": gpu_seconds, "counted": counted, "created_at": now}
    changed = {"gpu_seconds": gpu_seconds, "counted": counted, "released_at": None}
    conn.execute(insert(quota_holds).values(**values).on_conflict_do_update(index_elements=["job_id"], set_=changed))


def hold_counted(conn: Connection, owner: Tenant, job_id: str, gpu_seconds: float, now: datetime) -> Refusal | None:
    """Replace the first estimate by the counted time; returns a refusal, and changes nothing, if that is more and does not fit."""
    before = conn.execute(sa.select(quota_holds.c.gpu_seconds).where(quota_holds.c.job_id == job_id)).scalar() or 0.0
    if gpu_seconds > before:
        refusal = quotas.fits(owner, standing(conn, owner.id, now, without=job_id), gpu_seconds)
        if refusal is not None:
            return refusal
    hold(conn, owner.id, job_id, gpu_seconds, counted=True, now=now)
    return None


def hold_again(conn: Connection, owner: Tenant, job_id: str, now: datetime) -> Refusal | None:
    """Hold the rest of a job whose hold was released when the cap paused it; a job that still has a hold keeps it."""
    used = _used_by(quota_holds.c.job_id).label("used_s")
    query = sa.select(*columns(quota_holds, ReleasedHold), *columns(jobs, ReleasedHold), used).join(jobs, jobs.c.id == quota_holds.c.job_id)
    held = one_or_none(
        conn, query.where(quota_holds.c.job_id == job_id, quota_holds.c.released_at.is_not(None)).params(now=now), ReleasedHold
    )
    if held is None:
        return None
    refusal = quotas.may_go_on(owner, standing(conn, owner.id, now), held.rest_s)
    if refusal is None:
        hold(conn, owner.id, job_id, held.used_s + held.rest_s, counted=held.counted, now=now)
    return refusal


def hold_evaluation(conn: Connection, job_ids: Collection[str], now: datetime) -> None:
    """Reduce the holds of these jobs, which are trained, to what their evaluation takes."""
    expected = (
        sa.select(sa.func.coalesce(jobs.c.evaluation_s * jobs.c.evaluation_gpus, 0.0))
        .where(jobs.c.id == quota_holds.c.job_id)
        .scalar_subquery()
    )
    this = quota_holds.c.job_id.in_(job_ids) & quota_holds.c.released_at.is_(None)
    conn.execute(sa.update(quota_holds).where(this).values(gpu_seconds=_used_by(quota_holds.c.job_id) + expected), {"now": now})


def release_all(conn: Connection, job_ids: Collection[str], now: datetime) -> None:
    """Release the holds of these jobs."""
    this = quota_holds.c.job_id.in_(job_ids) & quota_holds.c.released_at.is_(None)
    conn.execute(sa.update(quota_holds).where(this).values(released_at=now))


def capped(conn: Connection, tenant_ids: Collection[str], now: datetime, *, num_gpus: int) -> dict[str, str]:
    """Return those of these tenants that reached their hard cap, with the reason in words.

    Called every second. A tenant's use is summed again only when it could have reached its cap since, on all `num_gpus`; for a tenant at
    its cap every few seconds, for any other at least once a minute.
    """
    if not tenant_ids:
        return {}
    having = [t for t in many(conn, _tenants(tenant_ids), Tenant) if t.hard_gpu_hours is not None]
    known = _SEEN.setdefault(conn.engine.pool, {})
    due = [t.id for t in having if t.id not in known or not known[t.id].is_current(t, now, num_gpus)]
    if due:
        known.update({tenant: _Seen(at=now, standing=at) for tenant, at in standings(conn, due, now).items()})
    return {t.id: cap_reached(t, known[t.id].standing, now) for t in having if quotas.at_cap(t, known[t.id].standing)}


def _tenants(ids: Collection[str]) -> sa.Select[Any]:
    return sa.select(*TENANT).where(tenants.c.id.in_(ids))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    """Current use, and when it was summed."""

    at: datetime
    standing: Standing

    def is_current(self, tenant: Tenant, now: datetime, num_gpus: int) -> bool:
        """Whether this sum still shows correctly if the cap is reached."""
        age = now - self.at
        if age < timedelta(0) or month_of(self.at) != month_of(now):
            return False
        if quotas.at_cap(tenant, self.standing):
            return age < CAPPED_FOR
        at_most = Standing(settled_s=self.standing.used_s + age.total_seconds() * num_gpus)
        return age < SEEN_FOR and not quotas.at_cap(tenant, at_most)


_SEEN: WeakKeyDictionary[Pool, dict[str, _Seen]] = WeakKeyDictionary()
"""By database (the connection pool, which all scopes of an engine share) and tenant."""


def cap_reached(tenant: Tenant, at: Standing, now: datetime) -> str:
    """Return the message for a job that waits for its tenant's cap."""
    return (
        f"{quotas.hours(at.used_s)} of the {tenant.hard_gpu_hours:g} GPU-hours of tenant {tenant.id} are used this month: the hard cap is "
        f"reached. The job resumes when the cap is raised, or from {month_of(now).ends:%Y-%m-%d} 00:00 UTC"
    )


_NOW, _BEGINS, _ENDS = (sa.bindparam(name, type_=sa.DateTime(timezone=True)) for name in ("now", "begins", "ends"))
"""Times in the statements below, which are built once: building them takes longer than executing them."""
_WITHOUT = sa.bindparam("without", type_=sa.Text)


@cache
def _time_by_tenant(but_one: bool) -> sa.CompoundSelect[Any]:
    """Return what sums the parts of a :class:`Standing` by tenant; `but_one`: without one job."""
    return sa.union_all(*_time_used(but_one), _time_held(but_one))


def _time_used(but_one: bool) -> tuple[sa.Select[Any], sa.Select[Any]]:
    """Return GPU-seconds used in the month by tenant: attempts in the ledger, and those that run, or are not entered yet, and that the
    platform does not pay."""
    entry = ledger_entries
    others = entry.c.job_id.is_distinct_from(_WITHOUT) if but_one else sa.true()
    settled = (
        sa.select(entry.c.tenant_id, sa.literal("settled_s"), sa.func.sum(_net_s(entry) * _share_of_month(entry)))
        .where(_of_tenants(entry), entry.c.occurred_at >= _BEGINS, entry.c.occurred_at < _ENDS)
        .where(entry.c.kind == "usage", others)
        .group_by(entry.c.tenant_id)
    )
    mine = (_of_tenants(jobs), jobs.c.id != _WITHOUT if but_one else sa.true(), ~is_free(reservations.c.evaluation_id))
    running = (
        sa.select(jobs.c.tenant_id, sa.literal("running_s"), sa.func.sum(_elapsed(since=_BEGINS)))
        .select_from(jobs.join(reservations, reservations.c.job_id == jobs.c.id).join(attempts, _same_attempt()))
        .where(*mine, *_open())
        .group_by(jobs.c.tenant_id)
    )
    return settled, running


def _time_held(but_one: bool) -> sa.Select[Any]:
    held = quota_holds.c
    rest = sa.func.greatest(0.0, held.gpu_seconds - _used_by(held.job_id))
    query = sa.select(held.tenant_id, sa.literal("held_s"), sa.func.sum(rest)).where(_of_tenants(quota_holds), held.released_at.is_(None))
    return query.where(held.job_id != _WITHOUT if but_one else sa.true()).group_by(held.tenant_id)


def _of_tenants(table: sa.FromClause) -> sa.ColumnElement[bool]:
    return table.c.tenant_id.in_(sa.bindparam("tenants", expanding=True))


def _used_by(job_id: sa.ColumnElement[str]) -> sa.ColumnElement[float]:
    """Return the GPU-seconds that a job has used, over all months."""
    entry = ledger_entries.alias()
    settled = sa.select(sa.func.coalesce(sa.func.sum(_net_s(entry)), 0.0)).where(entry.c.job_id == job_id, entry.c.kind == "usage")
    running = (
        sa.select(sa.func.coalesce(sa.func.sum(_elapsed()), 0.0))
        .select_from(reservations.join(attempts, _same_attempt()))
        .where(reservations.c.job_id == job_id, *_open())
    )
    return settled.scalar_subquery() + running.scalar_subquery()


def _net_s(entry: sa.FromClause) -> sa.ColumnElement[float]:
    """GPU-seconds of a usage entry less refunds of its attempt, whenever they were made."""
    refund = ledger_entries.alias()
    same = (refund.c.job_id == entry.c.job_id) & (refund.c.attempt == entry.c.attempt) & (refund.c.kind == "refund")
    back = sa.select(sa.func.coalesce(sa.func.sum(refund.c.gpu_seconds), 0.0)).where(same)
    return sa.func.greatest(0.0, entry.c.gpu_seconds - back.correlate(entry).scalar_subquery())


def _share_of_month(entry: sa.FromClause) -> sa.ColumnElement[float]:
    """Return the share of an ended attempt that ran since the month began; all of it if it was entered without times."""
    started, ended = (sa.cast(entry.c.detail[name].astext, sa.Float) for name in ("started_ms", "ended_ms"))
    after = (ended - sa.cast(sa.extract("epoch", _BEGINS), sa.Float) * 1000.0) / sa.func.nullif(ended - started, 0.0)
    return sa.case((after.is_(None), 1.0), else_=sa.func.least(1.0, sa.func.greatest(0.0, after)))  # both ignore nulls


def _open() -> tuple[sa.ColumnElement[bool], ...]:
    """Attempts that run, or have just ended and are not in the ledger yet."""
    entry = ledger_entries.alias()
    entered = sa.exists().where(entry.c.job_id == attempts.c.job_id, entry.c.attempt == attempts.c.attempt, entry.c.kind == "usage")
    late = sa.and_(reservations.c.released_at > _NOW - METERING_LAG, ~entered)
    return attempts.c.started_at.is_not(None), sa.or_(reservations.c.released_at.is_(None), late)


def _same_attempt() -> sa.ColumnElement[bool]:
    return (attempts.c.job_id == reservations.c.job_id) & (attempts.c.attempt == reservations.c.attempt)


def _elapsed(*, since: sa.ColumnElement[datetime] | None = None) -> sa.ColumnElement[float]:
    """GPU-seconds of an attempt until now, from `since` on."""
    began = attempts.c.started_at if since is None else sa.func.greatest(attempts.c.started_at, since)
    spent = sa.extract("epoch", sa.func.coalesce(attempts.c.ended_at, _NOW) - began)
    return sa.cast(sa.func.greatest(0, spent) * reservations.c.num_gpus, sa.Float)
