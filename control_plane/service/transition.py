"""The one function that changes a job's state, and the one that writes its events."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from control_plane.events import Event, Level, entered
from control_plane.jobs import FINAL, JobState, check_transition, openai_status
from control_plane.notifications import EVENT_TYPES
from control_plane.service import outbox
from control_plane.service.platform import utc_now
from control_plane.service.quotas import release
from control_plane.tables import job_events, jobs
from ft_assets.errors import NotFound


def locked(conn: Connection, job_id: str, *, tenant_id: str | None = None) -> RowMapping:
    """The row of a job, locked until the transaction ends: two changes of one job never interleave.

    With `tenant_id`, another tenant's job is ``NotFound`` like one that does not exist.
    """
    query = sa.select(jobs).where(jobs.c.id == job_id).with_for_update()
    if tenant_id is not None:
        query = query.where(jobs.c.tenant_id == tenant_id)
    row = conn.execute(query).mappings().one_or_none()
    if row is None:
        raise NotFound(
            f"no fine-tuning job {job_id!r}; list yours with GET /v1/fine_tuning/jobs", code="fine_tune_not_found", param="job_id"
        )
    return row


def transition(
    conn: Connection,
    job_id: str,
    target: JobState,
    *,
    code: str | None = None,
    message: str,
    level: Level | None = None,
    data: Mapping[str, Any] | None = None,
    now: datetime | None = None,
    **columns: Any,
) -> RowMapping:
    """Move a job to `target`, set further `columns`, write the event, and have the tenant told, all in the caller's transaction.

    Illegal moves raise ``Conflict`` and change nothing. ``queued_at``, ``started_at`` (first time only) and ``finished_at``
    follow from the target; so does the end of waiting: reason and queue position are cleared outside the queue. `code` is
    the event's code, the state's own by default, and `level` that of the state. Returns the row as it is now.
    """
    now = now or utc_now()
    row = locked(conn, job_id)
    check_transition(job_id, JobState(row["state"]), target)
    values = {"state": target.value, **_consequences(target, row, now), **columns}
    if target in FINAL or target is JobState.EVALUATING:  # whose GPU time is over
        release(conn, job_id, now)
    updated = conn.execute(sa.update(jobs).where(jobs.c.id == job_id).values(**values).returning(jobs)).mappings().one()
    _insert(conn, job_id, entered(target, message=message, code=code, level=level, data=data), now)
    _tell(conn, updated, now)
    return updated


def record(conn: Connection, job_id: str, event: Event, *, now: datetime | None = None) -> None:
    """Write an event of a job without changing its state.

    The job's row is locked first, so that the events of one job become visible in the order of their numbers and a reader
    that follows them misses none.
    """
    locked(conn, job_id)
    _insert(conn, job_id, event, now or utc_now())


def _tell(conn: Connection, job: RowMapping, now: datetime) -> None:
    """Ids and states alone: receivers keep what they are sent, also after the tenant has its data deleted."""
    kind = f"fine_tuning.job.{job['state']}"
    if kind not in EVENT_TYPES:
        return
    data = {"status": openai_status(JobState(job["state"])), "state": job["state"]}
    if job["error"] is not None:
        data["error_code"] = job["error"].get("code")
    outbox.publish(conn, job["tenant_id"], kind, job["id"], data, now=now)


def _consequences(target: JobState, row: RowMapping, now: datetime) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if row["state"] == JobState.QUEUED and row["waiting_since"] is not None:
        values |= {"waited_s": row["waited_s"] + (now - row["waiting_since"]).total_seconds()}
    if target is JobState.QUEUED:
        values |= {"queued_at": now, "waiting_since": now}
    elif not (target is JobState.PAUSED and row["state"] == JobState.PAUSING):  # why it is paused outlasts the pausing
        values |= {"reason": None, "reason_detail": None, "queue_position": None, "ahead": None, "promise": None, "expected_start_at": None}
    if target is JobState.RUNNING and row["started_at"] is None:
        values |= {"started_at": now}
    if target is not JobState.RUNNING:
        values |= {"checkpointing": False}
    if target in FINAL:
        values |= {"finished_at": now, "estimated_finish_at": None}
    return values


def _insert(conn: Connection, job_id: str, event: Event, now: datetime) -> None:
    conn.execute(
        sa.insert(job_events).values(
            id=f"ftevent-{uuid.uuid4().hex}",
            job_id=job_id,
            level=event.level,
            type=event.type,
            code=event.code,
            message=event.message,
            data=dict(event.data) if event.data is not None else None,
            created_at=now,
        )
    )
