"""States of a job, the one table of legal transitions, and what OpenAI's clients are told.

                      +------------- preempted <--------+
                      v                                 |
    validating -> queued -> provisioning -> running -> evaluating -> succeeded
         |          ^ |         |             |  |          |
         |          | +---------+----> paused <- pausing    +----> failed
         +----------+---------------- failed, cancelled (from every state that is not final)

After repeated failures without progress, a job becomes a ``dead_letter``. It has ended, and its tenant sees it as failed; operators
may release it, and it is queued again, or close it as ``failed``.

A job whose model failed its gate is ``failed``, and ``succeeded`` once a person releases the model; nothing else leaves a final state.
An experiment whose model failed its gate is ``succeeded``, without a model that is approved.
A job that would train what an earlier one has trained goes from ``validating`` to ``succeeded`` with that one's adapter.
``running`` has the sub-state ``checkpointing``, which is a fact about the workload and not a state of the job.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from core.errors import Conflict


class JobState(enum.StrEnum):
    VALIDATING = "validating"
    QUEUED = "queued"
    PROVISIONING = "provisioning"
    RUNNING = "running"
    EVALUATING = "evaluating"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    PAUSING = "pausing"
    PAUSED = "paused"
    PREEMPTED = "preempted"
    DEAD_LETTER = "dead_letter"


S = JobState
FINAL = frozenset({S.SUCCEEDED, S.FAILED, S.CANCELLED, S.DEAD_LETTER})
"""States of a job that has ended; only operators move one on, a dead letter."""
HOLDING_GPUS = frozenset({S.PROVISIONING, S.RUNNING, S.EVALUATING, S.PAUSING})
"""States in which a workload may exist that has to be stopped."""

TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    S.VALIDATING: frozenset({S.QUEUED, S.SUCCEEDED, S.FAILED, S.CANCELLED}),
    S.QUEUED: frozenset({S.PROVISIONING, S.PAUSED, S.FAILED, S.CANCELLED}),
    S.PROVISIONING: frozenset({S.RUNNING, S.QUEUED, S.EVALUATING, S.PAUSING, S.PREEMPTED, S.FAILED, S.CANCELLED, S.DEAD_LETTER}),
    S.RUNNING: frozenset({S.EVALUATING, S.QUEUED, S.PAUSING, S.PREEMPTED, S.FAILED, S.CANCELLED, S.DEAD_LETTER}),
    S.EVALUATING: frozenset({S.SUCCEEDED, S.FAILED, S.CANCELLED}),
    S.PAUSING: frozenset({S.PAUSED, S.QUEUED, S.EVALUATING, S.FAILED, S.CANCELLED, S.DEAD_LETTER}),
    S.PAUSED: frozenset({S.QUEUED, S.CANCELLED}),
    S.PREEMPTED: frozenset({S.QUEUED, S.FAILED, S.CANCELLED}),
    S.SUCCEEDED: frozenset(),
    S.FAILED: frozenset(),
    S.CANCELLED: frozenset(),
    S.DEAD_LETTER: frozenset({S.QUEUED, S.FAILED}),
}

OPENAI_STATUS: Mapping[JobState, str] = {
    S.VALIDATING: "validating_files",
    S.QUEUED: "queued",
    S.PROVISIONING: "queued",
    S.RUNNING: "running",
    S.EVALUATING: "running",
    S.SUCCEEDED: "succeeded",
    S.FAILED: "failed",
    S.CANCELLED: "cancelled",
    S.PAUSING: "pausing",
    S.PAUSED: "paused",
    S.PREEMPTED: "queued",
    S.DEAD_LETTER: "failed",
}


def openai_status(state: JobState) -> str:
    """Return the word of OpenAI's API for `state`."""
    return OPENAI_STATUS[state]


def check_transition(job_id: str, current: JobState, target: JobState) -> None:
    """Refuse an illegal move and list the legal ones; moving to the present state is illegal too."""
    if target in TRANSITIONS[current]:
        return
    legal = ", ".join(sorted(TRANSITIONS[current])) or "none: it is final"
    raise Conflict(
        f"job {job_id} is {current} and cannot become {target}; legal next states: {legal}", code="invalid_state", param="status"
    )
