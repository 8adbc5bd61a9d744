"""Claims about what the end of an attempt means."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from core.errors import Fault
from engine.training.failures import (
    EXIT_CODES,
    Evidence,
    ExitEvidence,
    Outcome,
    PastAttempt,
    Retry,
    StopReason,
    classify_failure,
    failures_without_progress,
    with_half_batch,
)
from engine.training.spec import TrainingSpec
from tests.support.jobs.training_specs import SPEC


def ended(outcome: Outcome, **detail: object) -> ExitEvidence:
    return ExitEvidence(outcome=outcome, step=5, total_steps=10, message=f"it ended as {outcome}", detail=detail)


def of_rows(per_device: int, accumulation: int, *, method: str = "sft") -> TrainingSpec:
    optimization = replace(SPEC.optimization, per_device_batch_size=per_device, accumulation_steps=accumulation)
    return replace(SPEC, method=method, optimization=optimization)


CASES = [
    ("diverged", Evidence(phase="exited", exit=ended(Outcome.DIVERGED)), "diverged", Fault.USER, Retry.NEVER),
    ("bad row", Evidence(phase="exited", exit=ended(Outcome.BAD_EXAMPLE)), "bad_example", Fault.USER, Retry.NEVER),
    ("oom", Evidence(phase="exited", exit=ended(Outcome.OOM), spec=SPEC), "oom", Fault.AMBIGUOUS, Retry.HALVE_BATCH),
    ("oom of one window", Evidence(phase="exited", exit=ended(Outcome.OOM), spec=of_rows(1, 4)), "oom", Fault.AMBIGUOUS, Retry.NEVER),
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
    found = classify_failure(evidence)
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
    assert classify_failure(evidence) is None


def test_every_outcome_has_an_exit_code_of_its_own() -> None:
    assert set(EXIT_CODES) == set(Outcome)
    assert len(set(EXIT_CODES.values())) == len(Outcome)


def test_an_oom_is_retried_once_only() -> None:
    history = [PastAttempt(code="oom", committed_step=0, last_step=0)]
    found = classify_failure(Evidence(phase="exited", exit=ended(Outcome.OOM), spec=SPEC, history=history))
    assert found is not None and found.retry is Retry.NEVER
    assert "smaller micro-batch did not fit either" in found.remedy and "retried" not in found.remedy


def _repeat(code: str, exit_: ExitEvidence | None, past: list[PastAttempt], *, committed: int = 5, last: int = 5) -> tuple[str, Retry]:
    found = classify_failure(Evidence(phase="exited", exit=exit_, history=past, committed_step=committed, last_step=last))
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


@pytest.mark.parametrize("exit_code", [-9, 137, None])
def test_third_lost_node_or_kill_without_progress_is_a_dead_letter(exit_code: int | None) -> None:
    lost = [PastAttempt(code="node_lost", committed_step=5, last_step=5)]
    evidence = Evidence(phase="exited" if exit_code else "lost", exit_code=exit_code, committed_step=5, last_step=5)
    found = [classify_failure(replace(evidence, history=lost * before)) for before in range(3)]
    assert [(f.code, f.retry) for f in found if f] == [("node_lost", Retry.RESUME)] * 2 + [("dead_letter", Retry.NEVER)]
    further = classify_failure(replace(evidence, history=lost * 2, committed_step=6, last_step=6))
    assert further is not None and further.code == "node_lost", "it had got further"


def test_requested_preemptions_are_no_failures() -> None:
    preempted = [PastAttempt(code="preempted", committed_step=5, last_step=5)] * 50
    asked = Evidence(phase="exited", exit=ended(Outcome.PREEMPTED), stop_reason=StopReason.PREEMPT, history=preempted, committed_step=5)
    found = classify_failure(asked)
    assert found is not None and found.retry is Retry.RESUME
    assert _repeat("preempted", ended(Outcome.PREEMPTED), preempted[:8]) == ("preempted", Retry.RESUME)
    assert _repeat("preempted", ended(Outcome.PREEMPTED), preempted) == ("dead_letter", Retry.NEVER)


def _attempts_until_given_up(code: str, exit_: ExitEvidence | None, steps: Iterator[tuple[int, int]]) -> int:
    past: list[PastAttempt] = []
    for committed, last in steps:
        if _repeat(code, exit_, past, committed=committed, last=last)[0] == "dead_letter":
            return len(past) + 1
        past.append(PastAttempt(code=code, committed_step=committed, last_step=last))
    raise AssertionError(f"never given up in {len(past)} attempts")


def test_a_job_that_breaks_now_here_now_there_is_a_dead_letter() -> None:
    internal = ended(Outcome.INTERNAL)
    assert _attempts_until_given_up("internal", internal, ((0, (20, 5)[n % 2]) for n in range(50))) == 3
    assert _attempts_until_given_up("internal", internal, ((0, (5, 20)[n % 2]) for n in range(50))) == 4
    for seed in range(20):
        drawn = random.Random(seed)
        assert _attempts_until_given_up("node_lost", None, ((0, drawn.randrange(500)) for _ in range(500))) < 500


def test_what_was_committed_is_progress_before_what_was_only_reached() -> None:
    past = [PastAttempt(code="internal", committed_step=10, last_step=19)] * 2
    assert _repeat("internal", ended(Outcome.INTERNAL), past, committed=12, last=13) == ("internal", Retry.RESUME)
    past = [PastAttempt(code="internal", committed_step=10, last_step=11)] * 2
    assert _repeat("internal", ended(Outcome.INTERNAL), past, committed=5, last=19) == ("dead_letter", Retry.NEVER)


def test_a_smaller_micro_batch_counts_anew() -> None:
    past = [PastAttempt(code=c, committed_step=9, last_step=9) for c in ("internal", "internal", "oom")]
    assert failures_without_progress(past, code="internal", committed_step=0, last_step=3) == 1


@pytest.mark.parametrize(
    ("method", "before", "after"),
    [
        ("sft", (4, 2), (2, 4)), ("sft", (3, 2), (2, 3)), ("sft", (3, 1), (1, 3)), ("sft", (5, 3), (3, 5)), ("sft", (5, 1), (1, 5)),
        ("sft", (1, 8), None), ("kto", (4, 1), (2, 2)), ("kto", (3, 2), (2, 3)), ("kto", (2, 4), (1, 8)), ("kto", (3, 1), (1, 3)),
    ],
)  # fmt: skip
def test_the_micro_batch_shrinks_as_far_as_the_global_batch_allows(
    method: str, before: tuple[int, int], after: tuple[int, int] | None
) -> None:
    spec = of_rows(*before, method=method)
    halved = with_half_batch(spec)
    found = halved and (halved.optimization.per_device_batch_size, halved.optimization.accumulation_steps)
    assert found == after
    end = classify_failure(Evidence(phase="exited", exit=ended(Outcome.OOM), spec=spec, committed_step=4))
    assert end is not None and (end.retry is Retry.HALVE_BATCH) == (after is not None)
    if after is None:
        assert "no smaller micro-batch is possible" in end.remedy
    else:
        assert f"{after[0]} instead of {before[0]} rows" in end.remedy
        assert "resumes from its last checkpoint" in end.remedy


@pytest.mark.parametrize(
    "of",
    [
        Evidence(phase="exited", stop_reason=StopReason.PAUSE),
        Evidence(phase="exited", stop_reason=StopReason.PREEMPT),
        Evidence(phase="lost"),
        Evidence(phase="exited", stall="no progress for 700 s"),
        Evidence(phase="exited", exit=ended(Outcome.INTERNAL)),
        Evidence(phase="exited", exit=ended(Outcome.OOM), spec=SPEC),
    ],
)
def test_only_an_attempt_with_a_checkpoint_is_said_to_go_on_from_one(of: Evidence) -> None:
    without, with_one = (
        classify_failure(replace(of, last_step=0, committed_step=0)),
        classify_failure(replace(of, last_step=5, committed_step=5)),
    )
    assert without is not None and with_one is not None
    assert "it starts again from its first step" in without.remedy and "checkpoint" not in without.message + without.remedy
    assert "it resumes from its last checkpoint" in with_one.remedy
    assert "step 0" not in without.message


def test_half_the_batch_is_the_same_global_batch() -> None:
    halved = with_half_batch(SPEC)
    assert halved is not None
    before, after = SPEC.optimization, halved.optimization
    assert (after.per_device_batch_size, after.accumulation_steps) == (before.per_device_batch_size // 2, before.accumulation_steps * 2)


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


def test_a_rank_that_lost_another_one_explains_nothing(tmp_path: Path) -> None:
    """Killed with -9, the other one left no word; with a word, that is the one that counts."""
    lost = {"outcome": "internal", "step": 4, "total_steps": 9, "message": "Connection reset by peer", "detail": {"communication": True}}
    (tmp_path / "exit-a1.json").write_text(json.dumps(lost))
    (tmp_path / "exit-a1.rank2.json").write_text(json.dumps(lost))
    assert ExitEvidence.read(tmp_path, 1) is None
    (tmp_path / "exit-a1.rank3.json").write_text(json.dumps(lost | {"outcome": "oom", "message": "no memory", "detail": {}}))
    found = ExitEvidence.read(tmp_path, 1)
    assert found is not None and found.message == "no memory"


RANK_ENDS = [
    ("oom behind a lost connection", [("internal", True), ("oom", False)], "oom"),
    ("a full disk behind a stop", [("preempted", False), ("disk_full", False)], "disk_full"),
    ("a bad row behind two lost connections", [("internal", True), ("internal", True), ("bad_example", False)], "bad_example"),
    ("an oom before an error that it caused", [("internal", True), ("internal", False), ("oom", False)], "oom"),
    ("a lost connection never outranks a stop", [("preempted", False), ("internal", True)], "preempted"),
    ("a leader that explains itself", [("diverged", False), ("oom", False)], "diverged"),
    ("lost connections alone", [("internal", True), ("internal", True)], "node_lost"),
    ("a leader that was killed", [None, ("internal", True)], "node_lost"),
    ("a leader that was killed, and an explanation", [None, ("internal", True), ("oom", False)], "oom"),
]


@pytest.mark.parametrize(("ends", "code"), [c[1:] for c in RANK_ENDS], ids=[c[0] for c in RANK_ENDS])
def test_of_several_ranks_the_one_that_knows_speaks(tmp_path: Path, ends: list[tuple[str, bool] | None], code: str) -> None:
    for rank, end in enumerate(ends):
        if end is not None:
            body = {"outcome": end[0], "step": 4, "total_steps": 9, "message": f"rank {rank}", "detail": {"communication": end[1]}}
            (tmp_path / f"exit-a1{f'.rank{rank}' if rank else ''}.json").write_text(json.dumps(body))
    found = classify_failure(Evidence(phase="exited", exit=ExitEvidence.read(tmp_path, 1), exit_code=1, spec=SPEC))
    assert found is not None and found.code == code


def test_a_stall_says_what_was_seen() -> None:
    found = classify_failure(Evidence(phase="exited", stop_reason=StopReason.STALLED, stall="no progress for 700 s", last_step=4))
    assert found is not None and found.code == "stalled" and "no progress for 700 s after step 4" in found.message


ROOM = [
    ("it was not started", "absent", None, 4, 4, "before it started; no work is lost"),
    ("it was loading", "exited", Outcome.PREEMPTED, 0, 0, "before its first step; nothing is lost"),
    ("it saved", "exited", Outcome.PREEMPTED, 5, 5, "at step 5, which is saved; nothing is lost"),
    ("it was killed", "exited", None, 4, 6, "steps after the checkpoint of step 4 are trained again"),
    ("it was killed before its first checkpoint", "lost", None, 0, 6, "steps after its start are trained again"),
]


@pytest.mark.parametrize(("phase", "outcome", "committed", "last", "words"), [c[1:] for c in ROOM], ids=[c[0] for c in ROOM])
def test_an_attempt_that_made_room_says_what_is_lost(phase: str, outcome: Outcome | None, committed: int, last: int, words: str) -> None:
    exit_ = None if outcome is None else ended(outcome)
    found = classify_failure(Evidence(phase=phase, exit=exit_, stop_reason=StopReason.PREEMPT, committed_step=committed, last_step=last))
    assert found is not None and (found.code, found.fault, found.retry) == ("preempted", Fault.PLATFORM, Retry.RESUME)
    assert words in found.message


def test_making_room_a_hundred_times_brings_no_job_nearer_to_its_end() -> None:
    asked = [PastAttempt(code="preempted", committed_step=5, last_step=5, excused=True)] * 100
    assert _repeat("preempted", ended(Outcome.PREEMPTED), asked) == ("preempted", Retry.RESUME)
