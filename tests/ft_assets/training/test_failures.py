"""Claims about what the end of an attempt means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ft_assets.errors import Fault
from ft_assets.training.failures import (
    EXIT_CODES,
    MAX_FAILURES_WITHOUT_PROGRESS,
    Evidence,
    ExitEvidence,
    Outcome,
    PastAttempt,
    Retry,
    StopReason,
    classify,
    with_half_batch,
)
from tests.ft_assets.training.attempts import SPEC


def ended(outcome: Outcome, **detail: object) -> ExitEvidence:
    return ExitEvidence(outcome=outcome, step=5, total_steps=10, message=f"it ended as {outcome}", detail=detail)


CASES = [
    ("diverged", Evidence(phase="exited", exit=ended(Outcome.DIVERGED)), "diverged", Fault.USER, Retry.NEVER),
    ("bad row", Evidence(phase="exited", exit=ended(Outcome.BAD_EXAMPLE)), "bad_example", Fault.USER, Retry.NEVER),
    ("oom", Evidence(phase="exited", exit=ended(Outcome.OOM, per_device_batch_size=4)), "oom", Fault.AMBIGUOUS, Retry.HALVE_BATCH),
    ("oom of one window", Evidence(phase="exited", exit=ended(Outcome.OOM, per_device_batch_size=1)), "oom", Fault.AMBIGUOUS, Retry.NEVER),
    ("preempted", Evidence(phase="exited", exit=ended(Outcome.PREEMPTED)), "preempted", Fault.PLATFORM, Retry.RESUME),
    ("internal", Evidence(phase="exited", exit=ended(Outcome.INTERNAL)), "internal", Fault.PLATFORM, Retry.RESUME),
    ("disk full", Evidence(phase="exited", exit=ended(Outcome.DISK_FULL)), "disk_full", Fault.PLATFORM, Retry.RESUME),
    (
        "no base model",
        Evidence(phase="exited", exit=ended(Outcome.INTERNAL, code="base_model_unavailable")),
        "base_model_unavailable",
        Fault.PLATFORM,
        Retry.RESUME,
    ),
    ("killed under its watcher", Evidence(phase="exited", exit_code=-9), "node_lost", Fault.PLATFORM, Retry.RESUME),
    ("killed under torchrun", Evidence(phase="exited", exit_code=1), "node_lost", Fault.PLATFORM, Retry.RESUME),
    ("gone with its watcher", Evidence(phase="lost"), "node_lost", Fault.PLATFORM, Retry.RESUME),
    ("silent", Evidence(phase="running", heartbeat_age_s=31), "stalled", Fault.PLATFORM, Retry.RESUME),
    (
        "stopped for silence, and it answered",
        Evidence(phase="exited", exit=ended(Outcome.PREEMPTED), stop_reason=StopReason.STALLED),
        "stalled",
        Fault.PLATFORM,
        Retry.RESUME,
    ),
    (
        "cancelled",
        Evidence(phase="exited", exit=ended(Outcome.PREEMPTED), stop_reason=StopReason.CANCEL),
        "cancelled",
        Fault.USER,
        Retry.NEVER,
    ),
    ("cancelled and killed", Evidence(phase="exited", exit_code=-9, stop_reason=StopReason.CANCEL), "cancelled", Fault.USER, Retry.NEVER),
    ("paused", Evidence(phase="exited", exit=ended(Outcome.PREEMPTED), stop_reason=StopReason.PAUSE), "paused", Fault.USER, Retry.NEVER),
    (
        "diverged before the cancel reached it",
        Evidence(phase="exited", exit=ended(Outcome.DIVERGED), stop_reason=StopReason.CANCEL),
        "diverged",
        Fault.USER,
        Retry.NEVER,
    ),
]


@pytest.mark.parametrize(("evidence", "code", "fault", "retry"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_each_ending_has_its_class(evidence: Evidence, code: str, fault: Fault, retry: Retry) -> None:
    found = classify(evidence)
    assert found is not None
    assert (found.code, found.fault, found.retry) == (code, fault, retry)
    assert found.message and found.remedy


@pytest.mark.parametrize(
    "evidence",
    [
        Evidence(phase="exited", exit=ended(Outcome.SUCCEEDED)),
        Evidence(phase="exited", exit=ended(Outcome.SUCCEEDED), stop_reason=StopReason.CANCEL),
        Evidence(phase="running", heartbeat_age_s=3),
        Evidence(phase="pending"),
    ],
)
def test_success_and_a_healthy_run_are_no_failure(evidence: Evidence) -> None:
    assert classify(evidence) is None


def test_every_outcome_has_an_exit_code_of_its_own() -> None:
    assert set(EXIT_CODES) == set(Outcome)
    assert len(set(EXIT_CODES.values())) == len(Outcome)


def test_an_oom_is_retried_once_only() -> None:
    history = [PastAttempt(code="oom", committed_step=0, last_step=0)]
    found = classify(Evidence(phase="exited", exit=ended(Outcome.OOM, per_device_batch_size=4), history=history))
    assert found is not None and found.retry is Retry.NEVER


def _repeat(code: str, exit_: ExitEvidence | None, past: list[PastAttempt], *, committed: int = 5, last: int = 5) -> tuple[str, Retry]:
    found = classify(Evidence(phase="exited", exit=exit_, history=past, committed_step=committed, last_step=last))
    assert found is not None
    return found.code, found.retry


def test_three_internal_failures_at_the_same_step_are_a_dead_letter() -> None:
    past = [PastAttempt(code="internal", committed_step=5, last_step=5)]
    assert _repeat("internal", ended(Outcome.INTERNAL), past) == ("internal", Retry.RESUME)
    assert _repeat("internal", ended(Outcome.INTERNAL), past * 2) == ("dead_letter", Retry.NEVER)


def test_progress_starts_the_count_anew() -> None:
    past = [PastAttempt(code="internal", committed_step=n, last_step=n) for n in (1, 2, 3, 4)]
    assert _repeat("internal", ended(Outcome.INTERNAL), past) == ("internal", Retry.RESUME)
    assert _repeat("internal", ended(Outcome.INTERNAL), past, committed=4, last=4) == ("internal", Retry.RESUME)


def test_a_preemption_in_between_does_not_excuse_a_poison_job() -> None:
    same = {"committed_step": 5, "last_step": 5}
    past = [PastAttempt(code=c, **same) for c in ("internal", "preempted", "internal", "preempted")]
    assert _repeat("internal", ended(Outcome.INTERNAL), past) == ("dead_letter", Retry.NEVER)


def test_lost_nodes_are_forgiven_more_often_and_preemptions_always() -> None:
    lost = [PastAttempt(code="node_lost", committed_step=5, last_step=5)]
    limit = MAX_FAILURES_WITHOUT_PROGRESS["node_lost"]
    assert _repeat("node_lost", None, lost * (limit - 2)) == ("node_lost", Retry.RESUME)
    assert _repeat("node_lost", None, lost * (limit - 1)) == ("dead_letter", Retry.NEVER)
    preempted = [PastAttempt(code="preempted", committed_step=5, last_step=5)] * 50
    assert _repeat("preempted", ended(Outcome.PREEMPTED), preempted) == ("preempted", Retry.RESUME)


def test_half_the_batch_is_the_same_global_batch() -> None:
    halved = with_half_batch(SPEC)
    assert halved is not None
    before, after = SPEC.optimization, halved.optimization
    assert (after.per_device_batch_size, after.accumulation_steps) == (before.per_device_batch_size // 2, before.accumulation_steps * 2)
    assert with_half_batch(halved) is None


def test_evidence_is_read_back_and_a_torn_file_is_none(tmp_path: Path) -> None:
    body = {"outcome": "oom", "step": 1, "total_steps": 2, "message": "m", "trained_tokens": 3, "train_s": 0.5, "detail": {}}
    (tmp_path / "exit-a1.json").write_text(json.dumps(body))
    (tmp_path / "exit-a2.json").write_text(json.dumps(body)[:30])
    found = ExitEvidence.read(tmp_path, 1)
    assert found is not None and found.outcome is Outcome.OOM
    assert ExitEvidence.read(tmp_path, 2) is None
    assert ExitEvidence.read(tmp_path, 3) is None


def test_the_rank_that_failed_speaks_for_a_leader_that_was_only_stopped(tmp_path: Path) -> None:
    body = {"outcome": "preempted", "step": 1, "total_steps": 2, "message": "m", "trained_tokens": 3, "train_s": 0.5, "detail": {}}
    (tmp_path / "exit-a1.json").write_text(json.dumps(body))
    (tmp_path / "exit-a1.rank1.json").write_text(json.dumps({**body, "outcome": "oom"}))
    found = ExitEvidence.read(tmp_path, 1)
    assert found is not None and found.outcome is Outcome.OOM
