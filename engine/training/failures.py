"""Classifies the end of an attempt: who is responsible, what to report, and whether to retry.

The training process writes what it knows into ``exit-a<N>.json``; if that is missing, the workload's phase and the age of its last
heartbeat decide. ``classify`` is pure: evidence and earlier attempts in, one :class:`FailureClass` out.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from core.errors import Fault
from core.typed_json import from_json
from engine.training.spec import TrainingSpec


class Outcome(enum.StrEnum):
    """Outcome that the training process writes; its exit code is in :data:`EXIT_CODES`."""

    SUCCEEDED = "succeeded"
    BAD_SPEC = "bad_spec"
    BAD_EXAMPLE = "bad_example"
    INTERNAL = "internal"
    PREEMPTED = "preempted"
    DIVERGED = "diverged"
    OOM = "oom"
    PACKING_REFUSED = "packing_refused"
    DISK_FULL = "disk_full"


EXIT_CODES: Mapping[Outcome, int] = {
    Outcome.SUCCEEDED: 0,
    Outcome.BAD_SPEC: 64,  # EX_USAGE
    Outcome.BAD_EXAMPLE: 65,  # EX_DATAERR
    Outcome.INTERNAL: 70,  # EX_SOFTWARE
    Outcome.DISK_FULL: 74,  # EX_IOERR
    Outcome.PREEMPTED: 75,  # EX_TEMPFAIL
    Outcome.DIVERGED: 76,
    Outcome.OOM: 77,
    Outcome.PACKING_REFUSED: 78,
}


class Retry(enum.StrEnum):
    NEVER = "never"
    RESUME = "resume"
    """Retry the same spec from the latest valid checkpoint."""
    HALVE_BATCH = "halve_batch"
    """Half the windows per micro-batch and twice the accumulation steps: the same global batch."""


class StopReason(enum.StrEnum):
    """Why the platform asked the workload to stop."""

    PREEMPT = "preempt"
    PAUSE = "pause"
    CANCEL = "cancel"
    STALLED = "stalled"
    """No heartbeat for :data:`HEARTBEAT_LIMIT_S`, or heartbeats without progress."""


HEARTBEAT_LIMIT_S = 30.0
MAX_FAILURES_WITHOUT_PROGRESS: Mapping[str, int] = {"internal": 3, "stalled": 3, "node_lost": 3, "disk_full": 5, "preempted": 10}
"""Failures with the same code, since an attempt last got further than all before it, after which the job is given up. A
process that was killed (SIGKILL) left no report, and counts as ``node_lost``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitEvidence:
    """``exit-a<N>.json`` as the training process wrote it."""

    outcome: Outcome
    step: int
    total_steps: int
    message: str
    trained_tokens: int = 0
    train_s: float = 0.0
    detail: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, work_dir: Path, attempt: int) -> ExitEvidence | None:
        """Reads the exit file of `attempt`; None if it is missing or torn, or if ranks only report that they lost one another.

        A rank other than the first of its node writes its own file only when it failed by itself. Its explanation takes precedence over a
        first one that was only stopped because of it, or only lost the connection to it.
        """
        leader = cls._parse(work_dir / f"exit-a{attempt}.json")
        if leader is not None and leader.outcome is not Outcome.PREEMPTED and not leader._lost_another():
            return leader
        followers = [found for path in sorted(work_dir.glob(f"exit-a{attempt}.rank*.json")) if (found := cls._parse(path))]
        explained = sorted((f for f in followers if not f._lost_another()), key=lambda f: f.outcome is Outcome.INTERNAL)
        return next(iter(explained), None if leader is None or leader._lost_another() else leader)

    def _lost_another(self) -> bool:
        """Whether a broken exchange with another rank ended the process: it shows that a rank is gone, but not why."""
        return self.outcome is Outcome.INTERNAL and bool(self.detail.get("communication"))

    @classmethod
    def _parse(cls, path: Path) -> ExitEvidence | None:
        try:
            found = from_json(cls, json.loads(path.read_text()))
            return None if found.outcome is None else found
        except (OSError, ValueError, AttributeError, TypeError):
            return None


def lost_another_rank(work_dir: Path, attempt: int) -> bool:
    """Whether any rank in `work_dir` says that it only lost the connection to another: the cause may be on another node."""
    paths = (path for pattern in ("", ".rank*") for path in work_dir.glob(f"exit-a{attempt}{pattern}.json"))
    return any(found._lost_another() for path in paths if (found := ExitEvidence._parse(path)))


@dataclass(frozen=True, kw_only=True, slots=True)
class PastAttempt:
    """An earlier attempt of the same job, oldest first in a history."""

    code: str
    committed_step: int
    """Step of the newest committed checkpoint when it ended; 0 if none."""
    last_step: int
    """The furthest optimizer step that it is known to have finished."""
    excused: bool = False
    """It was asked to make room for another job, or operators released the job after it: never counted as a failure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    phase: str
    """Phase of the workload, as in ``control_plane.platform.protocols.WorkloadPhase``."""
    exit: ExitEvidence | None = None
    exit_code: int | None = None
    """Exit code of the leader process; under torchrun it only shows that some rank failed."""
    stop_reason: StopReason | None = None
    heartbeat_age_s: float | None = None
    stall: str | None = None
    """What was observed of a workload that was stopped because it stalled."""
    spec: TrainingSpec | None = None
    """The spec that was trained: determines whether a smaller micro-batch remains to try."""
    committed_step: int = 0
    last_step: int = 0
    history: Sequence[PastAttempt] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureClass:
    code: str
    """Stable code: ``preempted``, ``node_lost``, ``oom``, ``diverged``, ..."""
    fault: Fault
    retry: Retry
    message: str
    """What happened, with the step."""
    remedy: str
    """Next step for the reader of the job's error."""


def classify_failure(e: Evidence) -> FailureClass | None:
    """Returns how the attempt ended; None if it succeeded or is still running normally.

    1. Success is what the process reports, regardless of pending stop requests.
    2. A stop by the tenant (cancel, pause) is not retried.
    3. A stop that makes room for another job is not a failure, even if nothing had started, or the workload did not answer and was killed.
    4. A failure that the process itself explains keeps its explanation.
    5. No evidence: stalled if that is why it was stopped or its heartbeat is too old, else its node was lost.
    6. A rule that resumes gives up after N failures without progress.
    """
    if e.exit is not None and e.exit.outcome is Outcome.SUCCEEDED:
        return None
    stopped = e.exit is None or e.exit.outcome is Outcome.PREEMPTED
    if e.stop_reason in (StopReason.CANCEL, StopReason.PAUSE) and stopped:
        return _stopped(e, cancelled=e.stop_reason is StopReason.CANCEL)
    if e.stop_reason is StopReason.PREEMPT and stopped and e.phase not in ("pending", "running"):
        return _was_preempted_early(e)
    if e.exit is not None and not (e.exit.outcome is Outcome.PREEMPTED and e.stop_reason is StopReason.STALLED):
        found = _explained(e, e.exit)
    elif e.stop_reason is StopReason.STALLED or (e.phase == "running" and (e.heartbeat_age_s or 0.0) > HEARTBEAT_LIMIT_S):
        found = _stalled(e)
    elif e.phase in ("pending", "running"):
        return None
    else:
        found = _node_lost(e)
    return _dead_letter(found, e) or found


def with_half_batch(spec: TrainingSpec) -> TrainingSpec | None:
    """Returns `spec` with half the rows per micro-batch, or the nearest smaller number that keeps the global batch; None if it has one
    row."""
    opt = spec.optimization
    rows = opt.per_device_batch_size * opt.accumulation_steps
    most = min((opt.per_device_batch_size + 1) // 2, opt.per_device_batch_size - 1)
    smaller = next((n for n in range(most, 0, -1) if rows % n == 0), None)
    if smaller is None:
        return None
    return replace(spec, optimization=replace(opt, per_device_batch_size=smaller, accumulation_steps=rows // smaller))


def failures_without_progress(history: Sequence[PastAttempt], *, code: str, committed_step: int, last_step: int) -> int:
    """Counts failures with `code`, including this one, since an attempt last got further than all attempts before it.

    Progress means committed steps: later steps are lost with the attempt. Failures with other codes in between neither count nor reset the
    count, so two that alternate forever also end. After the micro-batch was reduced, the count starts again.
    """
    past = list(history)
    began = max((i + 1 for i, p in enumerate(past) if p.code == Outcome.OOM), default=0)
    row = [*past[began:], PastAttempt(code=code, committed_step=committed_step, last_step=last_step)]
    furthest, since = (-1, -1), 0
    for i, attempt in enumerate(row):
        reached = (attempt.committed_step, attempt.last_step)
        if reached > furthest:
            furthest, since = reached, i
    return sum(attempt.code == code and not attempt.excused for attempt in row[since:])


def _stopped(e: Evidence, *, cancelled: bool) -> FailureClass:
    return FailureClass(
        code="cancelled" if cancelled else "paused",
        fault=Fault.USER,
        retry=Retry.NEVER,
        message=f"stopped {_moment(e, 'at')} because the job was {'cancelled' if cancelled else 'paused'}",
        remedy="submit the job again to train it from the start" if cancelled else f"resume the job: {_onward(e)}",
    )


def _moment(e: Evidence, preposition: str = "after") -> str:
    return f"{preposition} step {e.last_step}" if e.last_step else "before its first step"


def _onward(e: Evidence) -> str:
    """Step from which the next attempt starts."""
    return "it resumes from its last checkpoint" if e.committed_step else "it starts again from its first step"


def _was_preempted_early(e: Evidence) -> FailureClass:
    """The attempt gave its GPUs to another job at the platform's request."""
    again = e.last_step - e.committed_step
    if e.phase == "absent":
        message = "it gave its GPUs to another job before it started; no work is lost"
    elif e.last_step == 0:
        message = "it gave its GPUs to another job before its first step; nothing is lost"
    elif again <= 0:
        message = f"it gave its GPUs to another job at step {e.last_step}, which is saved; nothing is lost"
    else:
        since = f"the checkpoint of step {e.committed_step}" if e.committed_step else "its start"
        message = f"it gave its GPUs to another job after step {e.last_step}, which is not saved; steps after {since} are trained again"
    return _resumed(e, Outcome.PREEMPTED, message, when=" when capacity is free")


def _stalled(e: Evidence) -> FailureClass:
    age = "unknown" if e.heartbeat_age_s is None else f"{e.heartbeat_age_s:.0f} s"
    return _resumed(e, "stalled", f"{e.stall or f'no heartbeat within {HEARTBEAT_LIMIT_S:.0f} s (age {age})'} {_moment(e)}")


def _node_lost(e: Evidence) -> FailureClass:
    how = "its processes are gone" if e.exit_code is None else f"exit code {e.exit_code}"
    message = f"the training process ended without an exit report ({e.phase}, {how}) {_moment(e)}: killed, or its node was lost"
    return _resumed(e, "node_lost", message)


def _resumed(e: Evidence, code: str, message: str, *, when: str = "") -> FailureClass:
    remedy = f"nothing to do: {_onward(e)}{when}"
    return FailureClass(code=code, fault=Fault.PLATFORM, retry=Retry.RESUME, message=message, remedy=remedy)


def _explained(e: Evidence, exit_: ExitEvidence) -> FailureClass:
    fault, retry, remedy = _RULES[exit_.outcome]
    code = str(exit_.outcome)
    if retry is Retry.RESUME:
        remedy = remedy.format(onward=_onward(e))
    if exit_.outcome is Outcome.OOM:
        retry, remedy = _after_oom(e)
    if exit_.outcome is Outcome.INTERNAL and exit_.detail.get("code") == "base_model_unavailable":
        code, remedy = "base_model_unavailable", "an operator must restore the base model on the node; the job then resumes automatically"
    return FailureClass(code=code, fault=fault, retry=retry, message=exit_.message, remedy=remedy)


def _after_oom(e: Evidence) -> tuple[Retry, str]:
    """States whether it is retried and what follows for this training."""
    full = e.spec is not None and e.spec.lora is None
    lower = f"lower max_seq_len{', train with lora' if full else ' or rank'}, or use more GPUs"
    if any(p.code == Outcome.OOM for p in e.history):
        return Retry.NEVER, f"the smaller micro-batch did not fit either: {lower}"
    halved = None if e.spec is None else with_half_batch(e.spec)
    if e.spec is None or halved is None:
        return Retry.NEVER, f"not retried because no smaller micro-batch is possible: {lower}"
    before, after = e.spec.optimization, halved.optimization
    how = "half the micro-batch" if 2 * after.per_device_batch_size == before.per_device_batch_size else "a smaller micro-batch"
    rows = f"{after.per_device_batch_size} instead of {before.per_device_batch_size} rows, the same global batch"
    return Retry.HALVE_BATCH, f"it is retried once with {how} ({rows}): {_onward(e)}; if that fails too, {lower}"


_RULES: Mapping[Outcome, tuple[Fault, Retry, str]] = {
    Outcome.BAD_SPEC: (Fault.PLATFORM, Retry.NEVER, "report it: submission should have refused this combination"),
    Outcome.BAD_EXAMPLE: (Fault.USER, Retry.NEVER, "correct or remove the named row and submit the file again"),
    Outcome.INTERNAL: (Fault.PLATFORM, Retry.RESUME, "nothing to do: {onward}; operators see the traceback"),
    Outcome.PREEMPTED: (Fault.PLATFORM, Retry.RESUME, "nothing to do: {onward} when capacity is free"),
    Outcome.DIVERGED: (
        Fault.USER,
        Retry.NEVER,
        "lower learning_rate to a third, or raise warmup_ratio; then look for rows with very long or garbled answers",
    ),
    Outcome.OOM: (Fault.AMBIGUOUS, Retry.HALVE_BATCH, ""),  # `_after_oom`
    Outcome.DISK_FULL: (
        Fault.PLATFORM,
        Retry.RESUME,
        "checkpoints of finished jobs were removed from the machine, and {onward}; if space is still short, an operator must free some",
    ),
    Outcome.PACKING_REFUSED: (
        Fault.PLATFORM,
        Retry.NEVER,
        "report it: this base model's attention crosses example boundaries in packed windows",
    ),
}


def _dead_letter(found: FailureClass, e: Evidence) -> FailureClass | None:
    limit = MAX_FAILURES_WITHOUT_PROGRESS.get("internal" if found.code == "base_model_unavailable" else found.code)
    if found.retry is not Retry.RESUME or limit is None:
        return None
    count = failures_without_progress(e.history, code=found.code, committed_step=e.committed_step, last_step=e.last_step)
    if count < limit:
        return None
    return FailureClass(
        code="dead_letter",
        fault=found.fault,
        retry=Retry.NEVER,
        message=f"{count} attempts ended as {found.code} without progress (the last at step {e.last_step}); last: {found.message}",
        remedy="operators look at its attempts and release it, and it goes on; or submit the job again",
    )
