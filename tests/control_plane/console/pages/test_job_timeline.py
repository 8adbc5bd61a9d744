"""A job's events become a timeline: one entry per change of its state, with checkpoints counted, and what is still to come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from control_plane.console.pages.job_timeline import timeline
from control_plane.jobs.tables import JobEvent
from control_plane.platform.job_states import FINAL, JobState

START = datetime(2026, 11, 1, tzinfo=UTC)


def events(*told: str | tuple[str, Mapping[str, Any]]) -> Sequence[JobEvent]:
    """Events with these codes, and data where given."""
    both = [one if isinstance(one, tuple) else (one, None) for one in told]
    return [
        JobEvent(
            seq=i, id=f"e{i}", level="info", type="message", code=code, message=f"about {code}", data=data,
            created_at=START + timedelta(minutes=i),
        )
        for i, (code, data) in enumerate(both)
    ]  # fmt: skip


def checkpoint(step: int) -> tuple[str, Mapping[str, Any]]:
    return "checkpoint", {"step": step, "attempt": 1}


def test_a_preempted_job_shows_both_attempts_and_its_checkpoints() -> None:
    told = events(
        "job_created", "job_queued", "job_provisioning", ("job_running", {"attempt": 1}), checkpoint(20), checkpoint(40), "job_preempted",
        "job_queued", "job_provisioning", ("job_running", {"attempt": 2}), checkpoint(60),
    )  # fmt: skip
    found = timeline(told, JobState.RUNNING)
    assert [(one.title, one.mark, one.num_checkpoints, one.last_checkpoint) for one in found[3:5]] == [
        ("Training", "done", 2, 40), ("Preempted", "warn", 0, 0),
    ]  # fmt: skip
    assert [(one.title, one.attempt, one.mark) for one in found[7:]] == [
        ("Training", 2, "now"), ("Evaluating", None, ""), ("Succeeded", None, ""),
    ]  # fmt: skip
    assert found[7].at == START + timedelta(minutes=9)


def test_messages_of_other_kinds_make_no_entry() -> None:
    found = timeline(events("job_created", "quota_overage", "provisioning_progress", "job_queued"), JobState.QUEUED)
    assert [one.title for one in found] == ["Submitted", "In the queue", "Starting", "Training", "Evaluating", "Succeeded"]


def test_nothing_follows_the_end() -> None:
    ends = {JobState.SUCCEEDED: "done", JobState.FAILED: "failed", JobState.CANCELLED: "failed", JobState.DEAD_LETTER: "failed"}
    assert set(ends) == FINAL
    for state, mark in ends.items():
        found = timeline(events("job_created", f"job_{state}"), state)
        assert [one.mark for one in found] == ["done", mark], state


def test_each_unfinished_state_has_a_place_and_something_to_come() -> None:
    for state in set(JobState) - FINAL:
        found = timeline(events("job_created", f"job_{state}"), state)
        assert [one.mark for one in found].count("now") == 1, state
        assert found[-1].title == "Succeeded", state
        assert found[-1].mark == "", state
