"""Ending an attempt of an evaluation: what its evidence shows, and what follows for the job or the ordered evaluation.

The result is in the object store; the run of the Dagster job `evaluate` or `reevaluate` that waits for the attempt makes the report of it.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from agent.messages import EXPORT_TIMED_OUT, REFUSED, TIMED_OUT, Exit
from control_plane.attempts.claims import Claim, Ending
from control_plane.attempts.tables import attempts
from control_plane.evaluations.tables import evaluations, is_free
from control_plane.jobs.tables import Job, jobs
from control_plane.jobs.transitions import fail_in
from control_plane.platform.job_states import JobState
from control_plane.platform.protocols import WorkloadPhase, WorkloadStatus
from control_plane.queue.tables import reservations
from core.errors import Conflict, Fault, FtError, InvalidRequest
from engine.training import FailureClass, Outcome, Retry, StopReason

FAILED = "evaluation_failed"
MAX_FAILURES = 3
"""Attempts of one evaluation that may fail; what was killed three times (for its memory, say) will be again."""


DEFECTS = frozenset({"llama_cpp_missing", "export_not_faithful"})
"""Codes of what is the platform's fault, and would end the same way again."""


def is_wanted(conn: Connection, job_id: str, evaluation_id: str | None) -> bool:
    """Whether the result is still needed: not if the job was cancelled or failed, or the ordered evaluation is given up."""
    if evaluation_id is None:
        return bool(conn.execute(sa.select(jobs.c.state).where(jobs.c.id == job_id)).scalar() == JobState.EVALUATING)
    return bool(conn.execute(sa.select(evaluations.c.state).where(evaluations.c.id == evaluation_id)).scalar() == "running")


def judge(said: Exit | None, status: WorkloadStatus, *, cancelled: bool, stalled: bool, asked: bool = False) -> Ending:
    """Return how the attempt ended, by the first of these that holds.

    1. Cancelled: its result was no longer needed.
    2. The process ended by itself and its result was stored: succeeded.
    3. The agent names an error. What the process refused, and what took too long, fails again, so it is final.
    4. It was stopped because it was silent, or its agent gave up because nothing went on.
    5. It was stopped from outside, or was `asked` to stop: it goes on elsewhere, and that is no failure.
    6. It was killed, or its node was lost.
    """
    code = status.exit_code if said is None or said.exit_code is None else said.exit_code
    failure: FailureClass | None
    if cancelled or (said is not None and said.stop_reason == StopReason.CANCEL):
        failure = _failure("cancelled", "its result is no longer needed", fault=Fault.USER, retry=Retry.NEVER)
    elif said is not None and said.evidence is not None and said.error is None:
        failure = None
    elif said is not None and said.error is not None:
        failure = _reported(said)
    elif stalled or (said is not None and said.stop_reason == StopReason.STALLED):
        failure = _failure("evaluation_stalled", (said and said.stall) or "nothing was heard of it")
    elif said is not None or asked:
        failure = _failure(Outcome.PREEMPTED, "its node took it back")
    elif status.phase is WorkloadPhase.EXITED:
        failure = _failure(FAILED, f"it was killed, or ended without a result (exit code {code})")
    else:
        failure = _failure("node_lost", "its node was lost")
    outcome = failure.code if failure else Outcome.SUCCEEDED
    return Ending(outcome=outcome, failure=failure, last_step=0, trained_tokens=0, status=replace(status, exit_code=code))


def _reported(said: Exit) -> FailureClass:
    assert said.error is not None
    code, message = str(said.error["code"]), str(said.error["message"])
    refused = (said.evidence or {}).get(REFUSED) is True
    ours = code in DEFECTS
    final = ours or refused or code in (TIMED_OUT, EXPORT_TIMED_OUT)
    fault = Fault.USER if final and not ours else Fault.PLATFORM
    return _failure(code, message, fault=fault, retry=Retry.NEVER if final else Retry.RESUME)


def _failure(code: str, message: str, *, fault: Fault = Fault.PLATFORM, retry: Retry = Retry.RESUME) -> FailureClass:
    return FailureClass(code=code, fault=fault, retry=retry, message=message, remedy="an operator looks at its log")


def settled(conn: Connection, held: Claim, ending: Ending) -> Ending:
    """Mark an evaluation that the platform pays as free."""
    return replace(ending, free=bool(conn.execute(sa.select(is_free(sa.literal(held.evaluation_id)))).scalar()))


def move(conn: Connection, held: Claim, job: Job, ending: Ending, now: datetime) -> JobState:
    """Have the evaluation wait for another attempt, or end it, if this one has failed; returns the job's state.

    A success changes nothing here: the result is there, and a run makes the report of it.
    """
    failure = ending.failure
    if failure is None or failure.code == "cancelled":
        return job.state
    again = failure.retry is not Retry.NEVER and _failures(conn, held) < MAX_FAILURES
    if held.evaluation_id is not None:
        _end_ordered(conn, held, _error(held, failure), again=again, now=now)
        return job.state
    if job.state is not JobState.EVALUATING:
        return job.state
    if again:
        conn.execute(sa.update(jobs).where(jobs.c.id == job.id).values(evaluate_runs=jobs.c.evaluate_runs + 1))
        return job.state
    fail_in(conn, job, _error(held, failure), now=now)
    return JobState.FAILED


def _failures(conn: Connection, held: Claim) -> int:
    """Return the ended attempts of this evaluation that count as failures: all but those that their node took back."""
    r, a = reservations.c, attempts.c
    query = sa.select(sa.func.count()).join_from(reservations, attempts, (a.job_id == r.job_id) & (a.attempt == r.attempt))
    same = (r.job_id == held.job_id, r.kind == held.kind, r.evaluation_id.is_not_distinct_from(held.evaluation_id))
    return int(conn.execute(query.where(*same, a.ended_at.is_not(None), a.outcome != Outcome.PREEMPTED)).scalar_one())


def _end_ordered(conn: Connection, held: Claim, error: FtError, *, again: bool, now: datetime) -> None:
    ended: dict[str, Any] = {"state": "queued"} if again else {"state": "failed", "finished_at": now}
    this = (evaluations.c.id == held.evaluation_id) & (evaluations.c.state == "running")
    conn.execute(sa.update(evaluations).where(this).values(error=error.to_dict(), **ended))


def _error(held: Claim, failure: FailureClass) -> FtError:
    message = f"attempt {held.attempt} of the evaluation: {failure.message}"
    return FtError(message, code=FAILED if failure.code in ("node_lost", Outcome.PREEMPTED) else failure.code)


def refused(status: WorkloadStatus, error: FtError) -> Ending:
    """Return the end of an attempt whose workload was not started, or was stopped, because of `error`; it is free."""
    final = isinstance(error, InvalidRequest | Conflict)
    failure = _failure(error.code, error.message, retry=Retry.NEVER if final else Retry.RESUME)
    seen = status.ended_at is not None
    return Ending(outcome=error.code, failure=failure, last_step=0, trained_tokens=0, status=status, seen=seen)
