"""What happened to a job, in order: stays in the queue, attempts, checkpoints, preemptions; and what is still to come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from control_plane.jobs.tables import JobEvent
from control_plane.platform.job_states import FINAL, JobState

TITLES = {
    "job_created": "Submitted", "job_validating": "Preparing the data", "job_queued": "In the queue", "job_resumed": "In the queue again",
    "job_provisioning": "Starting", "job_running": "Training", "job_pausing": "Pausing", "job_paused": "Paused",
    "job_preempted": "Preempted", "job_evaluating": "Evaluating", "job_succeeded": "Succeeded", "job_reused": "Succeeded",
    "job_failed": "Failed", "job_cancelled": "Cancelled", "job_dead_letter": "Given up", "job_released": "In the queue again",
}  # fmt: skip
"""Events that begin an entry."""
MARKS = {"job_failed": "failed", "job_dead_letter": "failed", "job_cancelled": "failed", "job_preempted": "warn", "job_paused": "warn"}
ROAD = (
    (JobState.QUEUED, "In the queue"), (JobState.PROVISIONING, "Starting"), (JobState.RUNNING, "Training"),
    (JobState.EVALUATING, "Evaluating"), (JobState.SUCCEEDED, "Succeeded"),
)  # fmt: skip
"""States of a job that nothing stops, in order."""
BEFORE = {
    JobState.VALIDATING: -1, JobState.PREEMPTED: 0, JobState.PAUSED: 0, JobState.PAUSING: 2,
}  # fmt: skip
"""Place on the road of states beside it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Milestone:
    """An entry of the timeline."""

    title: str
    mark: str = ""
    """``done``, ``now``, ``warn``, ``failed``; empty: still to come."""
    at: datetime | None = None
    detail: str = ""
    attempt: int | None = None
    num_checkpoints: int = 0
    last_checkpoint: int = 0
    """Step of the newest checkpoint."""


def timeline(events: Sequence[JobEvent], state: JobState) -> Sequence[Milestone]:
    """Return the entries for a job's messages, oldest first, followed by the states that it has yet to reach."""
    past = list(_past(events))
    if state in FINAL:
        return past
    if past:
        past[-1] = replace(past[-1], mark="now")
    place = BEFORE.get(state, next((i for i, (on_road, _) in enumerate(ROAD) if on_road is state), -1))
    return [*past, *(Milestone(title=title) for _, title in ROAD[place + 1 :])]


def _past(events: Sequence[JobEvent]) -> Iterator[Milestone]:
    """Yield an entry for each change of the state; checkpoints count to the entry before them."""
    current: Milestone | None = None
    for event in events:
        data = event.data or {}
        if event.code in TITLES:
            if current is not None:
                yield current
            detail = "" if event.code in ("job_created", "job_running") else event.message
            current = Milestone(
                title=TITLES[event.code],
                mark=MARKS.get(event.code, "done"),
                at=event.created_at,
                detail=detail,
                attempt=data.get("attempt"),
            )
        elif event.code == "checkpoint" and current is not None:
            current = replace(current, num_checkpoints=current.num_checkpoints + 1, last_checkpoint=int(data.get("step", 0)))
    if current is not None:
        yield current
