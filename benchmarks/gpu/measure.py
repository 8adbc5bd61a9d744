"""From a case to its numbers, read from what the training process writes."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu import evaluation
from benchmarks.gpu.attempts import Failed, Job
from benchmarks.gpu.cases import WARM_UP, Trial
from core.durable_files import sha256_of

GIB = 2**30


def run(trial: Trial, job: Job) -> dict[str, Any]:
    """What `trial` shows; ``Failed`` or ``OutOfTime`` if it shows nothing."""
    return {"speed": _speed, "checkpoints": _checkpoints, "resume": _resume, "evaluation": _evaluation}[trial.kind](trial, job)


def _speed(trial: Trial, job: Job) -> dict[str, Any]:
    job.start()
    lines = job.await_step(WARM_UP + trial.steps)
    job.kill()
    found = throughput(lines)
    return found | memory(trial, lines, on_cpu=job.on_cpu) | _start(job, lines) | met(trial, found)


def _checkpoints(trial: Trial, job: Job) -> dict[str, Any]:
    job.start()
    exit_ = _expect(job, "succeeded")
    lines = job.steps()
    gaps = [later["time"] - earlier["time"] for earlier, later in itertools.pairwise(lines)]
    detail = exit_["detail"]
    every = trial.spec().checkpoint.every_steps
    count = len({*range(every, trial.steps + 1, every), trial.steps})
    newest = max((job.work / "checkpoints").glob("step-*"))
    return {
        "checkpoints": count,
        "checkpoint_stall_s": detail["checkpoint_stall_s"],
        "checkpoint_gib": round(sum(f.stat().st_size for f in newest.rglob("*") if f.is_file()) / GIB, 3),
        "step_s": round(statistics.median(m["step_s"] for m in lines), 4),
        "largest_gap_s": round(max(gaps), 3),
        "train_s": exit_["train_s"],
    } | memory(trial, lines, on_cpu=job.on_cpu)


def _resume(trial: Trial, job: Job) -> dict[str, Any]:
    """Once without a break; then again with a SIGTERM on the way and a second attempt. The claim: the same losses, and the same bytes of
    weights and optimizer in the checkpoint after the last step."""
    job.start()
    job.await_checkpoint(trial.steps)
    job.kill()
    whole, weights = _through(job, trial.steps), _weights(job, trial.steps)
    broken = Job(root=job.root / "broken", spec=job.spec, base=job.base, pack=job.pack, deadline=job.deadline, on_cpu=job.on_cpu)
    broken.root.mkdir()
    try:
        broken.start()
        broken.await_step(trial.steps // 2)
        asked = time.monotonic()
        broken.terminate()
        stopped = _expect(broken, "preempted")
        stop_s = time.monotonic() - asked
        committed = int(stopped["detail"]["committed_step"])
        broken.start()
        first = next(m for m in broken.await_step(committed + 1) if m["step"] == committed + 1)
        broken.await_checkpoint(trial.steps)
        broken.kill()
        again, same = _through(broken, trial.steps), _weights(broken, trial.steps) == weights
    finally:
        broken.kill()
    return {
        "stop_s": round(stop_s, 3),
        "committed_step": committed,
        "resume_s": round(first["time"] - broken.started_at, 3),
        "first_start_s": round(whole[0]["time"] - job.started_at, 3),
        "largest_loss_difference": max(abs(a["loss"] - b["loss"]) for a, b in zip(whole, again, strict=True)),
        "same_bytes": same,
    }


def throughput(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the steps after the warm-up; tokens are those of examples, not of padding."""
    measured = [m for m in lines if m["step"] > WARM_UP]
    before = next(m["num_tokens"] for m in lines if m["step"] == WARM_UP)
    seconds = sum(m["step_s"] for m in measured)
    mfu = [m["mfu"] for m in measured if m["mfu"] is not None]
    return {
        "steps": len(measured),
        "tokens_per_s": round((measured[-1]["num_tokens"] - before) / seconds, 1),
        "step_s": round(statistics.median(m["step_s"] for m in measured), 4),
        "slowest_step_s": round(max(m["step_s"] for m in measured), 4),
        "data_s": round(statistics.median(m["data_s"] for m in measured), 4),
        "mfu": round(statistics.mean(mfu), 4) if mfu else None,
    }


def memory(trial: Trial, lines: Sequence[Mapping[str, Any]], *, on_cpu: bool) -> dict[str, Any]:
    """Peak against the estimate. A GPU's peak counts tensors, a CPU's the whole process: each has its own estimate beside it."""
    peak = max(int(m["memory_bytes"]) for m in lines)
    estimated = trial.estimated_bytes(on_cpu=on_cpu, overheads=on_cpu)
    return {
        "peak_gib": round(peak / GIB, 2),
        "estimate_gib": round(estimated / GIB, 2),
        "estimate_error": round(estimated / peak - 1, 4),
        "estimate_with_reserve_gib": round(trial.estimated_bytes(on_cpu=on_cpu, overheads=True) / GIB, 2),
    }


def _evaluation(trial: Trial, job: Job) -> dict[str, Any]:
    found = evaluation.run(trial, job)
    found["items_per_s"] = round(found["items"] / found["evaluation_s"], 2)
    return found | met(trial, found)


def met(trial: Trial, numbers: Mapping[str, Any]) -> dict[str, Any]:
    if trial.goal is None:
        return {}
    found = numbers[trial.goal.metric]
    goal = {"metric": trial.goal.metric, "at_least": trial.goal.at_least}
    return {"goal": goal | {"met": None if found is None else found >= trial.goal.at_least}}


def _start(job: Job, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"first_step_after_s": round(lines[0]["time"] - job.started_at, 2)}


def _expect(job: Job, outcome: str) -> dict[str, Any]:
    found = job.await_end()
    if found["outcome"] != outcome:
        raise Failed(f"ended {found['outcome']} instead of {outcome}: {found['message']}")
    return found


def _through(job: Job, step: int) -> list[dict[str, Any]]:
    return [line for line in job.steps() if line["step"] <= step]


def _weights(job: Job, step: int) -> dict[str, str]:
    """Digest of each file of weights and of the optimizer."""
    files = sorted(job.checkpoint(step).glob("*.safetensors"))
    return {file.name: sha256_of(file) for file in files}
