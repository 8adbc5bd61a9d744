"""Job state transitions and events. Nothing else changes a job's state or writes its events."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.jobs.tables import Job, job_events, jobs
from control_plane.notifications import outbox
from control_plane.platform.bulk_updates import among, update_each
from control_plane.platform.context import Platform, utc_now
from control_plane.platform.job_events import Event, Level, entered
from control_plane.platform.job_states import FINAL, HOLDING_GPUS, JobState, check_transition, openai_status
from control_plane.platform.records import columns, many, one_or_none
from control_plane.quotas.service import hold_evaluation, release_all
from core.errors import FtError, NotFound
from core.event_types import EVENT_TYPES

ALL = columns(jobs, Job)


def job_row(conn: Connection, tenant: str, job_id: str) -> Job:
    """Return the tenant's job; ``NotFound`` for another tenant's."""
    return _found(one_or_none(conn, sa.select(*ALL).where(jobs.c.id == job_id, jobs.c.tenant_id == tenant), Job), job_id)


def locked(conn: Connection, job_id: str, *, tenant_id: str | None = None) -> Job:
    """Return a job whose row is locked until the transaction ends, so that changes of one job never interleave.

    With `tenant_id`, another tenant's job is ``NotFound`` like one that does not exist.
    """
    query = sa.select(*ALL).where(jobs.c.id == job_id).with_for_update()
    return _found(one_or_none(conn, query if tenant_id is None else query.where(jobs.c.tenant_id == tenant_id), Job), job_id)


def _found(job: Job | None, job_id: str) -> Job:
    if job is None:
        raise NotFound(
            f"no fine-tuning job {job_id!r}; list yours with GET /v1/fine_tuning/jobs", code="fine_tune_not_found", param="job_id"
        )
    return job


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A job's move to the state `target`, with its event and further `columns` to set; `code` and `level` default to those of the state."""

    job_id: str
    target: JobState
    message: str
    code: str | None = None
    level: Level | None = None
    data: Mapping[str, Any] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


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
) -> None:
    """Move one job, see :func:`transition_many`."""
    move = Move(job_id=job_id, target=target, message=message, code=code, level=level, data=data, columns=columns)
    transition_many(conn, [move], now=now or utc_now())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Moving:
    """The columns of a job that a transition reads."""

    id: str
    tenant_id: str
    state: JobState
    error: Mapping[str, Any] | None
    waiting_since: datetime | None
    waited_s: float
    started_at: datetime | None
    barred_until: datetime | None
    evaluation_s: float | None


def transition_many(conn: Connection, moves: Sequence[Move], *, now: datetime) -> None:
    """Move jobs, write their events and queue notifications, all in the caller's transaction, with as many statements as for one job.

    If one move is illegal, raises ``Conflict`` and nothing changes. ``queued_at``, ``started_at`` (first time only) and ``finished_at``
    follow from the target; reason and queue position are cleared outside the queue. Rows are locked in order of their ids, so that
    concurrent callers do not deadlock.
    """
    if not moves:
        return
    by_id = {m.job_id: m for m in moves}
    query = sa.select(*columns(jobs, _Moving)).where(among(jobs.c.id, by_id)).order_by(jobs.c.id).with_for_update()
    found = {job.id: job for job in many(conn, query, _Moving)}
    for missing in sorted(set(by_id) - set(found)):
        _found(None, missing)
    changes = {m.job_id: {**_change(found[m.job_id], m.target, now), **m.columns} for m in moves}
    release_all(conn, [m.job_id for m in moves if m.target in FINAL], now)
    hold_evaluation(conn, [m.job_id for m in moves if m.target is JobState.EVALUATING], now)
    update_each(conn, jobs, [{"id": job_id, **values} for job_id, values in changes.items()])
    events = [(m.job_id, entered(m.target, message=m.message, code=m.code, level=m.level, data=m.data)) for m in moves]
    record_many(conn, events, now=now)
    outbox.publish_many(conn, [n for m in moves if (n := _notice(found[m.job_id], m.target, m.columns)) is not None], now=now)


def succeed_by_release(conn: Connection, job: Job, *, message: str, now: datetime, **columns: Any) -> None:
    """Have a job succeed whose model failed its gate and was released: the only move out of a final state. The job's row is locked.

    It keeps the time at which it ended. An experiment has succeeded already, and gets its model.
    """
    changed = {"state": JobState.SUCCEEDED.value, "error": sa.null(), **columns}
    conn.execute(sa.update(jobs).where(jobs.c.id == job.id).values(**changed))
    record_many(conn, [(job.id, entered(JobState.SUCCEEDED, message=message, code=None, level=None, data=None))], now=now)
    if job.state is not JobState.SUCCEEDED:
        data = {"status": openai_status(JobState.SUCCEEDED), "state": JobState.SUCCEEDED.value}
        outbox.publish(conn, job.tenant_id, f"fine_tuning.job.{JobState.SUCCEEDED}", job.id, data, now=now)


def record(conn: Connection, job_id: str, event: Event, *, now: datetime | None = None) -> None:
    """Write an event of a job without changing its state.

    Locks the job's row first, so that the job's events become visible in the order of their numbers and a reader that follows them misses
    none.
    """
    locked(conn, job_id)
    record_many(conn, [(job_id, event)], now=now or utc_now())


def _notice(job: _Moving, target: JobState, changed: Mapping[str, Any]) -> outbox.OutboxEvent | None:
    """Only ids and states: receivers keep what they get, even after the tenant has its data deleted."""
    kind = f"fine_tuning.job.{JobState.FAILED if target is JobState.DEAD_LETTER else target}"
    if kind not in EVENT_TYPES or (job.state is JobState.DEAD_LETTER and target is JobState.FAILED):  # reported as failed already
        return None
    data = {"status": openai_status(target), "state": target.value}
    if (error := changed.get("error", job.error)) is not None:
        data["error_code"] = error.get("code")
    return outbox.OutboxEvent(tenant=job.tenant_id, kind=kind, subject=job.id, data=data)


def _change(job: _Moving, target: JobState, now: datetime) -> Mapping[str, Any]:
    """Return what follows from a legal move."""
    check_transition(job.id, job.state, target)
    values: dict[str, object] = {"state": target.value}
    if job.state is JobState.QUEUED and job.waiting_since is not None:
        since = max(job.waiting_since, job.barred_until or job.waiting_since)  # time barred does not count as waiting
        values |= {"waited_s": job.waited_s + max(0.0, (now - since).total_seconds())}
    if target is JobState.QUEUED:
        values |= {"queued_at": now, "waiting_since": now}
        if job.state is not JobState.PREEMPTED:  # a new place without a wait so far; a preempted job keeps its place
            values |= {"due_at": None, "waited_s": 0.0}
    elif not (target is JobState.PAUSED and job.state is JobState.PAUSING):  # a paused job keeps the reason of its pause
        values |= {"reason": None, "reason_detail": None, "queue_position": None, "ahead": None, "promise": None, "expected_start_at": None}
    if target is JobState.RUNNING and job.started_at is None:
        values |= {"started_at": now}
    if target is not JobState.RUNNING:
        values |= {"checkpointing": False}
    if target is JobState.EVALUATING:
        values |= {"estimated_finish_at": now + timedelta(seconds=job.evaluation_s or 0.0)}
    if target in FINAL:
        values |= {"finished_at": now, "estimated_finish_at": None}
    return values


def record_many(conn: Connection, events: Sequence[tuple[str, Event]], *, now: datetime) -> None:
    """:func:`record` for many jobs, whose rows the caller has locked."""
    rows = [{"id": f"ftevent-{uuid.uuid4().hex}", "job_id": job_id, **asdict(event), "created_at": now} for job_id, event in events]
    if rows:
        conn.execute(sa.insert(job_events), rows)


def fail(platform: Platform, tenant: str, job_id: str, error: FtError) -> None:
    """Fail the job with `error` unless it has ended; its workload, if any, is asked to stop."""
    with platform.engine.begin() as conn:
        fail_in(conn, locked(conn, job_id, tenant_id=tenant), error, now=platform.clock())


def fail_in(conn: Connection, job: Job, error: FtError, *, now: datetime) -> None:
    """:func:`fail` for a `job` whose row is locked."""
    if job.state in FINAL:
        return
    columns: Mapping[str, Any] = {"error": error.to_dict()} | ({"stop_requested": "cancel"} if job.state in HOLDING_GPUS else {})
    transition(conn, job.id, JobState.FAILED, message=error.message, data={"fault": str(error.fault)}, now=now, **columns)


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
