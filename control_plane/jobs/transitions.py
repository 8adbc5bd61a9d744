"""Job state transitions and events. Nothing else changes a job's state or writes its events."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from control_plane.jobs.tables import job_events, jobs
from control_plane.notifications import outbox
from control_plane.notifications.rules import EVENT_TYPES
from control_plane.platform.bulk_updates import among, update_each
from control_plane.platform.context import Platform, utc_now
from control_plane.platform.job_events import Event, Level, entered
from control_plane.platform.job_states import FINAL, HOLDING_GPUS, JobState, check_transition, openai_status
from control_plane.quotas.service import release_all
from ft_assets.errors import FtError, NotFound

GPU_TIME_OVER = frozenset({*FINAL, JobState.EVALUATING})
READ = ("id", "tenant_id", "state", "error", "waiting_since", "waited_s", "started_at", "barred_until")
"""Columns that a transition reads."""


def locked(conn: Connection, job_id: str, *, tenant_id: str | None = None) -> RowMapping:
    """Return the row of a job, locked until the transaction ends, so that changes of one job never interleave.

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
    """Move a job to `target`, set further `columns`, write the event and queue notifications, all in the caller's transaction.

    Illegal moves raise ``Conflict`` and change nothing. ``queued_at``, ``started_at`` (first time only) and ``finished_at`` follow from the
    target; reason and queue position are cleared outside the queue. `code` and `level` of the event default to those of the state. Returns
    the new row.
    """
    now = now or utc_now()
    row = locked(conn, job_id)
    values = _change(dict(row), target, columns, now)
    if target in GPU_TIME_OVER:
        release_all(conn, [job_id], now)
    stored = {name: sa.null() if value is None else value for name, value in values.items()}  # JSON has its own null
    updated = conn.execute(sa.update(jobs).where(jobs.c.id == job_id).values(stored).returning(jobs)).mappings().one()
    record_many(conn, [(job_id, entered(target, message=message, code=code, level=level, data=data))], now=now)
    outbox.publish_many(conn, _outbox_events([dict(updated)]), now=now)
    return updated


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """Arguments of :func:`transition`, for :func:`transition_many`."""

    job_id: str
    target: JobState
    message: str
    code: str | None = None
    level: Level | None = None
    data: Mapping[str, Any] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


def transition_many(conn: Connection, moves: Sequence[Move], *, now: datetime) -> None:
    """:func:`transition` for many jobs, with as many statements as for one; if one move is illegal, nothing changes.

    Rows are locked in order of their ids, so that concurrent callers do not deadlock.
    """
    if not moves:
        return
    by_id = {m.job_id: m for m in moves}
    query = sa.select(*(jobs.c[name] for name in READ)).where(among(jobs.c.id, by_id)).order_by(jobs.c.id).with_for_update()
    rows = {row["id"]: dict(row) for row in conn.execute(query).mappings()}
    missing = sorted(set(by_id) - set(rows))
    if missing:
        raise NotFound(f"no fine-tuning job {missing[0]!r} (and {len(missing) - 1} more)", code="fine_tune_not_found", param="job_id")
    changes = {m.job_id: _change(rows[m.job_id], m.target, m.columns, now) for m in moves}
    release_all(conn, [m.job_id for m in moves if m.target in GPU_TIME_OVER], now)
    update_each(conn, jobs, [{"id": job_id, **values} for job_id, values in changes.items()])
    events = [(m.job_id, entered(m.target, message=m.message, code=m.code, level=m.level, data=m.data)) for m in moves]
    record_many(conn, events, now=now)
    outbox.publish_many(conn, _outbox_events([{**rows[m.job_id], **changes[m.job_id]} for m in moves]), now=now)


def record(conn: Connection, job_id: str, event: Event, *, now: datetime | None = None) -> None:
    """Write an event of a job without changing its state.

    Locks the job's row first, so that the job's events become visible in the order of their numbers and a reader that follows them misses
    none.
    """
    locked(conn, job_id)
    record_many(conn, [(job_id, event)], now=now or utc_now())


def _outbox_events(rows: Iterable[Mapping[str, Any]]) -> list[outbox.OutboxEvent]:
    """Only ids and states: receivers keep what they get, even after the tenant has its data deleted."""
    found: list[outbox.OutboxEvent] = []
    for job in rows:
        kind = f"fine_tuning.job.{job['state']}"
        if kind not in EVENT_TYPES:
            continue
        data = {"status": openai_status(JobState(job["state"])), "state": job["state"]}
        if job["error"] is not None:
            data["error_code"] = job["error"].get("code")
        found.append(outbox.OutboxEvent(tenant=job["tenant_id"], kind=kind, subject=job["id"], data=data))
    return found


def _change(row: Mapping[str, Any], target: JobState, columns: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """Return the columns that a legal move writes; reads :data:`READ`."""
    check_transition(row["id"], JobState(row["state"]), target)
    return {"state": target.value, **_consequences(target, row, now), **columns}


def _consequences(target: JobState, row: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if row["state"] == JobState.QUEUED and row["waiting_since"] is not None:
        since = max(row["waiting_since"], row["barred_until"] or row["waiting_since"])  # time barred does not count as waiting
        values |= {"waited_s": row["waited_s"] + max(0.0, (now - since).total_seconds())}
    if target is JobState.QUEUED:
        values |= {"queued_at": now, "waiting_since": now}
        if row["state"] != JobState.PREEMPTED:  # a new place without a wait so far; a preempted job keeps its place
            values |= {"due_at": None, "waited_s": 0.0}
    elif not (target is JobState.PAUSED and row["state"] == JobState.PAUSING):  # a paused job keeps the reason of its pause
        values |= {"reason": None, "reason_detail": None, "queue_position": None, "ahead": None, "promise": None, "expected_start_at": None}
    if target is JobState.RUNNING and row["started_at"] is None:
        values |= {"started_at": now}
    if target is not JobState.RUNNING:
        values |= {"checkpointing": False}
    if target in FINAL:
        values |= {"finished_at": now, "estimated_finish_at": None}
    return values


def record_many(conn: Connection, events: Sequence[tuple[str, Event]], *, now: datetime) -> None:
    """:func:`record` for many jobs, whose rows the caller has locked."""
    rows = [
        {
            "id": f"ftevent-{uuid.uuid4().hex}",
            "job_id": job_id,
            "level": event.level,
            "type": event.type,
            "code": event.code,
            "message": event.message,
            "data": dict(event.data) if event.data is not None else None,
            "created_at": now,
        }
        for job_id, event in events
    ]
    if rows:
        conn.execute(sa.insert(job_events), rows)


def job_row(conn: Connection, tenant: str, job_id: str) -> sa.Row[Any]:
    """Return the tenant's job; ``NotFound`` for another tenant's."""
    row = conn.execute(sa.select(jobs).where(jobs.c.id == job_id, jobs.c.tenant_id == tenant)).first()
    if row is None:
        raise NotFound(f"no fine-tuning job {job_id!r}", code="fine_tune_not_found", param="fine_tuning_job_id")
    return row


def fail(platform: Platform, tenant: str, job_id: str, error: FtError) -> None:
    """Fail the job with `error` unless it has ended; its workload, if any, is asked to stop."""
    with platform.engine.begin() as conn:
        fail_in(conn, locked(conn, job_id, tenant_id=tenant), error, now=platform.clock())


def fail_in(conn: Connection, job: RowMapping, error: FtError, *, now: datetime) -> None:
    """:func:`fail` for a `job` whose row is locked."""
    state = JobState(job["state"])
    if state in FINAL:
        return
    stop: dict[str, Any] = {"stop_requested": "cancel"} if state in HOLDING_GPUS else {}
    data, found = {"fault": str(error.fault)}, error.to_dict()
    transition(conn, job["id"], JobState.FAILED, message=error.message, data=data, now=now, error=found, **stop)


RunNumbers = tuple[int, ...]
"""The job's attempt number and the number of runs of each stage; a step with other numbers has been replaced."""
RUN_NUMBERS = (jobs.c.attempt, jobs.c.prepare_runs, jobs.c.train_runs, jobs.c.evaluate_runs)


def run_numbers(platform: Platform, job_id: str) -> RunNumbers:
    """Return the numbers that a step starting now sends with its heartbeats; empty if the job does not exist."""
    with platform.engine.connect() as conn:
        return tuple(conn.execute(sa.select(*RUN_NUMBERS).where(jobs.c.id == job_id)).first() or ())


def record_heartbeat(platform: Platform, job_id: str, numbers: RunNumbers) -> None:
    """Record that a step works on the job; without a heartbeat for a while, the job gets another run.

    Ignores heartbeats of a replaced step, which would hide the death of its successor.
    """
    still = [column == number for column, number in zip(RUN_NUMBERS, numbers, strict=False)]
    with platform.engine.begin() as conn:
        conn.execute(sa.update(jobs).where(jobs.c.id == job_id, *still).values(heartbeat_at=platform.clock()))
