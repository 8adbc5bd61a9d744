"""Pauses jobs when a tenant reaches its hard cap of GPU-hours, and resumes them when there is room again: one pass over all tenants.

Safe to repeat and to run twice at once: each job is moved under its lock, and each notice is written once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError

from control_plane.jobs.tables import jobs
from control_plane.jobs.transitions import locked, record, transition
from control_plane.notifications import outbox
from control_plane.platform.context import Platform
from control_plane.platform.job_events import Event
from control_plane.platform.job_states import JobState
from control_plane.platform.records import many
from control_plane.quotas import rules as policy
from control_plane.quotas import service as quotas
from control_plane.quotas.rules import HARD_CAP_REACHED, Standing, Threshold, month_of
from control_plane.quotas.tables import quota_holds, quota_notices
from control_plane.tenants.rules import Tenant
from control_plane.tenants.service import find_tenant
from control_plane.tenants.tables import TENANT, tenants
from core.errors import FtError

PAUSABLE = (JobState.PROVISIONING, JobState.RUNNING)

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """What one pass did."""

    notices: int
    """Notices written."""
    paused: list[str]
    resumed: list[str]


def enforce(platform: Platform) -> Round:
    """Notify tenants of limits they reached, pause jobs beyond a hard cap, and resume paused jobs that fit again."""
    now = platform.clock()
    with platform.engine.connect() as conn:
        watched = many(conn, _watched(now), Tenant)
        at = quotas.standings(conn, [t.id for t in watched], now) if watched else {}
    notices, paused, resumed = 0, list[str](), list[str]()
    for tenant in watched:
        try:
            notices += _tell(platform, tenant, at[tenant.id], now)
            if policy.at_cap(tenant, at[tenant.id]):
                paused += _pause_running(platform, tenant, at[tenant.id], now)
            elif tenant.suspended_at is None:
                resumed += _resume_paused(platform, tenant.id, now)
        except (FtError, SQLAlchemyError):  # other tenants continue, and the next pass tries again
            log.exception("the quota of tenant %s could not be enforced", tenant.id)
    return Round(notices=notices, paused=paused, resumed=resumed)


def _watched(now: datetime) -> sa.Select[Any]:
    """Return tenants whose use may have changed: one of their jobs holds time, did recently, or waits for the cap."""
    held = sa.select(quota_holds.c.tenant_id).where(
        sa.or_(quota_holds.c.released_at.is_(None), quota_holds.c.released_at > now - quotas.METERING_LAG)
    )
    waiting = sa.select(jobs.c.tenant_id).where(jobs.c.state == JobState.PAUSED.value, jobs.c.reason == HARD_CAP_REACHED)
    return sa.select(*TENANT).where(tenants.c.id.in_(sa.union(held, waiting))).order_by(tenants.c.id)


def _tell(platform: Platform, tenant: Tenant, at: Standing, now: datetime) -> int:
    """Write notices for the reached shares, each once a month: to the tenant, and as events of its running jobs."""
    reached = list(policy.reached(tenant, at))
    if not reached:
        return 0
    month, notices = month_of(now).name, 0
    with platform.engine.begin() as conn:
        for one in reached:
            key = {"tenant_id": tenant.id, "month": month, "quota": one.limit, "percent": one.percent, "gpu_hours": one.gpu_hours}
            new = insert(quota_notices).values(**key, created_at=now).on_conflict_do_nothing().returning(quota_notices.c.month)
            if conn.execute(new).first() is not None:
                _publish(conn, tenant, one, at, month, now)
                notices += 1
    return notices


def _publish(conn: Connection, tenant: Tenant, one: Threshold, at: Standing, month: str, now: datetime) -> None:
    capped = one.limit == "hard" and one.percent >= 100
    data = {
        "month": month,
        "limit": one.limit,
        "percent": one.percent,
        "limit_gpu_hours": one.gpu_hours,
        "used_gpu_hours": quotas.in_hours(at.used_s),
        "held_gpu_hours": quotas.in_hours(at.held_s),
    }
    outbox.publish(conn, tenant.id, "quota.hard_cap_reached" if capped else "quota.threshold_reached", tenant.id, data, now=now)
    if capped:  # each job records it with its own pause
        return
    onward = "what exceeds it is billed as overage" if one.limit == "soft" else policy.ON_HARD_CAP
    message = (
        f"{policy.hours(at.used_s)} GPU-hours are used this month: {one.percent} % of the {one.limit} limit of {one.gpu_hours:g} is "
        f"reached. {onward[0].upper()}{onward[1:].rstrip('.')}."
    )
    for job_id in _pausable(conn, tenant):
        record(conn, job_id, Event(code="quota_threshold_reached", level="warn", message=message, data=data), now=now)


def _pausable(conn: Connection, tenant: Tenant) -> Sequence[str]:
    this = jobs.c.tenant_id == tenant.id, jobs.c.state.in_([s.value for s in PAUSABLE])
    return conn.execute(sa.select(jobs.c.id).where(*this).order_by(jobs.c.id)).scalars().all()


def _pause_running(platform: Platform, tenant: Tenant, at: Standing, now: datetime) -> list[str]:
    with platform.engine.connect() as conn:
        running = _pausable(conn, tenant)
    detail = quotas.cap_reached(tenant, at, now)
    return [job_id for job_id in running if _pause(platform, job_id, detail, now)]


def _pause(platform: Platform, job_id: str, detail: str, now: datetime) -> bool:
    """Pause the job as usual, with the cause in its row; its hold is released."""
    with platform.engine.begin() as conn:
        state = locked(conn, job_id).state
        if state not in PAUSABLE:
            return False
        saves = "saves a checkpoint and is paused" if state is JobState.RUNNING else "is paused before its first step"
        message = f"{detail}. The job {saves}: nothing is lost."
        transition(
            conn, job_id, JobState.PAUSING, code=HARD_CAP_REACHED, level="warn", message=message, now=now, stop_requested="pause",
            reason=HARD_CAP_REACHED, reason_detail=detail,
        )  # fmt: skip
        quotas.release_all(conn, [job_id], now)
    return True


def _resume_paused(platform: Platform, tenant: str, now: datetime) -> list[str]:
    """Requeue jobs paused for the cap that fit now, oldest first. Jobs that the tenant paused stay paused."""
    capped = sa.select(jobs.c.id).where(
        jobs.c.tenant_id == tenant, jobs.c.state == JobState.PAUSED.value, jobs.c.reason == HARD_CAP_REACHED
    )
    with platform.engine.connect() as conn:
        waiting = list(conn.execute(capped.order_by(jobs.c.created_at, jobs.c.id)).scalars())
    resumed: list[str] = []
    for job_id in waiting:
        if not _resume(platform, tenant, job_id, now):
            break  # the oldest waits for room; jobs behind it must not take it
        resumed.append(job_id)
    return resumed


def _resume(platform: Platform, tenant: str, job_id: str, now: datetime) -> bool:
    with platform.engine.begin() as conn:
        owner = find_tenant(conn, tenant, lock=True)
        job = locked(conn, job_id)
        if job.state is not JobState.PAUSED or job.reason != HARD_CAP_REACHED:
            return True  # another process has moved it
        if owner.suspended_at is not None or quotas.hold_again(conn, owner, job_id, now) is not None:
            return False
        message = "The hard cap has room again: the job resumes from its checkpoint."
        until = now if job.started_at is None else job.capped_at
        transition(conn, job_id, JobState.QUEUED, code="job_resumed", message=message, now=now, stop_requested=None, capped_at=until)
    return True
