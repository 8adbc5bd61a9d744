"""Ending an attempt: its row, the ledger and the job, all in the transaction that releases its reservation; and the history of ended
attempts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.attempts.claims import Claim, Ending
from control_plane.attempts.tables import attempts, checkpoints
from control_plane.billing.metering import service as metering
from control_plane.capacity.configured_pools import named
from control_plane.jobs.tables import Job, job_events, jobs
from control_plane.jobs.transitions import locked, record, transition
from control_plane.platform.context import Platform
from control_plane.platform.job_events import RELEASED, Event
from control_plane.platform.job_states import FINAL, JobState
from control_plane.platform.protocols import WorkloadPhase, WorkloadStatus
from control_plane.queue import snapshot
from control_plane.queue.evictions import OPERATORS, SICK_NODE
from control_plane.queue.tables import reservations
from core.base_models import CHANGED
from core.epoch_time import span_words
from core.errors import Fault, IntegrityError
from engine import scheduler
from engine.training import FailureClass, Outcome, PastAttempt, Retry, TrainingSpec, with_half_batch


def reserved(held: Claim) -> sa.ColumnElement[bool]:
    """Select the attempt's reservation while it holds it."""
    return sa.and_(reservations.c.job_id == held.job_id, reservations.c.attempt == held.attempt, reservations.c.released_at.is_(None))


def of_attempt(held: Claim) -> sa.ColumnElement[bool]:
    """Select the row of the attempt."""
    return sa.and_(attempts.c.job_id == held.job_id, attempts.c.attempt == held.attempt)


@dataclass(frozen=True, kw_only=True, slots=True)
class Released:
    """A reservation that was just released."""

    preempted: bool
    """The scheduler had asked its attempt to make room."""
    for_tier: str | None
    """Tier of the job that it made room for; None if unknown."""
    evicted_for: str | None = None
    """Why it was stopped, if it was not for another job: one of ``control_plane.queue.evictions``."""

    @property
    def to_whom(self) -> str:
        return "back to the platform" if self.evicted_for else "to another job" if self.for_tier is None else f"to a {self.for_tier} job"


def release(conn: Connection, held: Claim, now: datetime) -> Released | None:
    """Release the reservation; None if it was already released."""
    given = sa.update(reservations).where(reserved(held)).values(released_at=now)
    row = conn.execute(given.returning(reservations.c.stop_asked_at, reservations.c.preempted_for)).one_or_none()
    if row is None:
        return None
    tier = conn.execute(sa.select(jobs.c.tier).where(jobs.c.id == row.preempted_for)).scalar()
    evicted_for = row.preempted_for if row.preempted_for in (OPERATORS, SICK_NODE) else None
    return Released(preempted=row.stop_asked_at is not None, for_tier=tier, evicted_for=evicted_for)


def settled(ending: Ending, job: Job, released: Released) -> Ending:
    """Adjust the ending to the job's state: if the tenant stopped the job while it made room, the tenant's stop counts."""
    failure, state = ending.failure, job.state
    made_room = released.preempted and failure is not None and failure.code == Outcome.PREEMPTED
    if failure is None or not made_room or state not in (JobState.CANCELLED, JobState.PAUSING):
        return ending
    code = "paused" if state is JobState.PAUSING else "cancelled"
    return replace(ending, outcome=code, failure=replace(failure, code=code, fault=Fault.USER, retry=Retry.NEVER))


def close(conn: Connection, held: Claim, ending: Ending, now: datetime) -> None:
    """Record how the attempt ended, and how much of its work will be repeated."""
    status = ending.status
    conn.execute(
        sa.update(attempts)
        .where(of_attempt(held))
        .values(
            outcome=ending.outcome,
            exit_code=status.exit_code,
            last_step=ending.last_step,
            lost_s=ending.again_s * held.num_gpus if _goes_on(ending) else 0.0,
            started_at=sa.func.coalesce(attempts.c.started_at, moment(status.started_at)),
            ended_at=moment(status.ended_at) or now,
        )
    )


def _goes_on(ending: Ending) -> bool:
    """Whether another attempt may follow."""
    return ending.failure is not None and (ending.failure.retry is not Retry.NEVER or ending.failure.code == "paused")


def bill(conn: Connection, platform: Platform, held: Claim, job: Job, ending: Ending, released: Released, now: datetime) -> None:
    """Report the end, and the start if that is missing, and bill the time between; a workload that never started costs nothing, and neither
    does one that left a sick node, whatever of its work is kept."""
    status = ending.status
    started = moment(status.started_at)
    if started is not None and ending.seen:
        report_started(conn, platform, held, job, at=started, now=now, seen=True)
    fault = Fault.PLATFORM if ending.free else ending.failure.fault if ending.failure else None
    ended = moment(status.ended_at) or metering.last_proof_of_life(conn, held.job_id, held.attempt)
    if ended is None:
        return
    work = metering.work(conn, held.job_id, held.attempt, began_at=moment(ending.began_at), kept_until=moment(ending.kept_until))
    kept = None if released.evicted_for == SICK_NODE and ending.outcome == Outcome.PREEMPTED else work
    metered = metering.Metered(tenant_id=held.tenant, job_id=held.job_id, attempt=held.attempt)
    metering.report_ended(conn, metered, outcome=ending.outcome, fault=fault, at=ended, now=now, seen=ending.seen, work=kept)
    metering.settle(conn, platform, metered)


def report_started(conn: Connection, platform: Platform, held: Claim, job: Job, *, at: datetime, now: datetime, seen: bool) -> None:
    pool = named(platform, held.pool)
    metered = metering.Metered(tenant_id=held.tenant, job_id=held.job_id, attempt=held.attempt)
    metering.report_started(conn, metered, tier=job.tier, model=job.model, pool=pool, num_gpus=held.num_gpus, at=at, now=now, seen=seen)


def move(conn: Connection, held: Claim, job: Job, ending: Ending, released: Released, now: datetime) -> JobState:
    """Move the job to the state that its attempt's end leads to; the rules are those of ``attempts.finish``."""
    data: dict[str, Any] = {"attempt": held.attempt, "outcome": ending.outcome, "step": ending.last_step}

    def to(target: JobState, message: str, *, more: Mapping[str, Any] | None = None, **columns: Any) -> JobState:
        transition(conn, held.job_id, target, message=message, data={**data, **(more or {})}, now=now, stop_requested=None, **columns)
        return target

    state, failure = job.state, ending.failure
    if state in FINAL:
        return state
    if failure is None:
        message = f"Training finished: {ending.last_step} steps. Evaluation is next."
        return to(JobState.EVALUATING, message, trained_tokens=ending.trained_tokens)
    again = with_half_batch(held.spec) if failure.retry is Retry.HALVE_BATCH else held.spec
    columns: dict[str, Any] = {} if again is None else {"spec": again.to_dict(), "spec_sha256": again.sha256}
    onward = _onward(held, again, saved=_saved(conn, held.job_id))
    if failure.code == "paused" or (state is JobState.PAUSING and failure.retry is not Retry.NEVER and again is not None):
        if state is not JobState.PAUSING:
            to(JobState.PAUSING, "The workload stopped.")
        where = f"at step {ending.last_step}" if ending.last_step else "before its first step"
        return to(JobState.PAUSED, f"Paused {where}; resume {onward}.", **columns)
    if failure.retry is Retry.NEVER or again is None:
        error = {"code": failure.code, "message": f"{failure.message}. Next: {failure.remedy}", "param": None}
        target = JobState.DEAD_LETTER if failure.code == JobState.DEAD_LETTER else JobState.FAILED
        return to(target, f"{error['message']}", error=error, more={"fault": str(failure.fault)})
    if released.preempted and failure.code == Outcome.PREEMPTED:
        reported = {"for_tier": released.for_tier, "lost_gpu_s": round(ending.again_s * held.num_gpus, 3)}
        why = failure.message.replace("to another job", released.to_whom)
        to(JobState.PREEMPTED, f"Attempt {held.attempt}: {why}.", more=reported, preemptions=job.preemptions + 1)
    else:
        to(JobState.PREEMPTED, f"Attempt {held.attempt}: {failure.message}.")
    return to(JobState.QUEUED, f"Queued again; training {onward}.", queued_at=job.queued_at, **columns)


def _saved(conn: Connection, job_id: str) -> int:
    """Return the step of the newest usable checkpoint; 0 for none."""
    kept = sa.select(sa.func.max(checkpoints.c.step)).where(checkpoints.c.job_id == job_id, checkpoints.c.retired_at.is_(None))
    return int(conn.execute(kept).scalar() or 0)


def _onward(held: Claim, again: TrainingSpec | None, *, saved: int) -> str:
    """Describe where the next attempt begins, and what changes for it."""
    where = "resumes from the last verified checkpoint" if saved else "starts from the first step"
    if again is None or again.sha256 == held.spec.sha256:
        return where
    return f"{where} with micro-batches of {again.optimization.per_device_batch_size} rows"


def changed_ending(held: Claim, error: IntegrityError, *, last_step: int) -> Ending:
    """Return the end of an attempt that was not started because its base model has changed: final, free, and the platform's fault."""
    remedy = "an operator restores the files of the base model; then submit the job again"
    failure = FailureClass(code=CHANGED, fault=Fault.PLATFORM, retry=Retry.NEVER, message=error.message, remedy=remedy)
    status = WorkloadStatus(name=held.workload, phase=WorkloadPhase.ABSENT)
    return Ending(outcome=CHANGED, failure=failure, last_step=last_step, trained_tokens=0, status=status)


def moment(unix: float | None) -> datetime | None:
    return None if unix is None else datetime.fromtimestamp(unix, tz=UTC)


def history(platform: Platform, job_id: str) -> list[PastAttempt]:
    """Return the job's ended attempts, oldest first.

    Committed steps are read from the events, because checkpoint rows are retired and name only the newest attempt that committed their
    step. The count restarts after an attempt that ran out of memory, because the next one may have started from the beginning.
    """
    step, by = (sa.cast(job_events.c.data[name].astext, sa.Integer) for name in ("step", "attempt"))
    reported = (
        sa.select(sa.func.coalesce(sa.func.max(step), 0))
        .where(job_events.c.job_id == attempts.c.job_id, job_events.c.code == "checkpoint", by == attempts.c.attempt)
        .scalar_subquery()
    )
    reached = sa.func.greatest(reported, sa.func.coalesce(attempts.c.from_step, 0)).label("reached")
    requested = (
        sa.exists()
        .where(reservations.c.job_id == attempts.c.job_id, reservations.c.attempt == attempts.c.attempt)
        .where(reservations.c.stop_asked_at.is_not(None))
        .label("preempted")
    )
    released_after = (
        sa.select(sa.func.max(by))
        .where(job_events.c.job_id == job_id, job_events.c.code == RELEASED)
        .scalar_subquery()
        .label("released_after")
    )
    query = sa.select(attempts, reached, requested, released_after).where(attempts.c.job_id == job_id, attempts.c.ended_at.is_not(None))
    with platform.engine.connect() as conn:
        rows = conn.execute(query.order_by(attempts.c.attempt)).all()
    found: list[PastAttempt] = []
    furthest = 0
    for row in rows:
        furthest = max(furthest, row.reached)
        excused = (row.preempted and row.outcome == Outcome.PREEMPTED) or row.attempt <= (row.released_after or 0)
        found.append(PastAttempt(code=row.outcome or "", committed_step=furthest, last_step=row.last_step or 0, excused=excused))
        if row.outcome == Outcome.OOM:
            furthest = 0
    return found


log = logging.getLogger(__name__)


def tell_when(platform: Platform, held: Claim) -> None:
    """Write when the job of `held`, which is queued again, is expected to resume.

    Forecasts from the present queue, after the transaction that released the GPUs, so that jobs waiting for them do not wait for the
    forecast. Writes nothing if no forecast is possible or the job has already resumed. Errors are logged and do not affect the attempt's
    end.
    """
    try:
        now = platform.clock().timestamp()
        start = scheduler.projected_start(snapshot.queue_snapshot(platform), held.job_id, now=now)
        if start is None:
            return
        with platform.engine.begin() as conn:
            job = locked(conn, held.job_id)
            if job.state is JobState.QUEUED and job.attempt == held.attempt:
                record(conn, held.job_id, _forecast(start, now), now=platform.clock())
    except Exception:
        log.exception("could not forecast when %s resumes", held.job_id)


def _forecast(start: float, now: float) -> Event:
    wait_s = max(0.0, start - now)
    soon = "at once" if wait_s < 60 else f"in about {span_words(wait_s)}"
    at = datetime.fromtimestamp(start, tz=UTC)
    message = f"It is expected to resume {soon} ({at:%Y-%m-%d %H:%M} UTC) and keeps its place in the queue."
    return Event(code="preemption_forecast", message=message, data={"expected_start": int(start)})
