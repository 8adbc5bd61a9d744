"""A training process without a model: it reads the run file and writes the agreed files, as ``scenario.json`` beside them says.

Its "weights" are a digest of every step's number, so that a resume from the wrong state ends with other ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from core.durable_files import write_json
from engine.training import checkpoints
from engine.training.failures import EXIT_CODES, Outcome
from engine.training.runtime.status_files import MetricsLog
from engine.training.spec import RunFile
from tests.support.jobs.sealed_checkpoints import commit


@dataclass(kw_only=True)
class Scenario:
    steps: int = 6
    every: int = 2
    """Steps between checkpoints."""
    step_s: float = 0.02
    hold_at: int = 0
    """Waits at this step, alive, until a file ``go`` appears."""
    end_at: dict[str, Any] = field(default_factory=dict)
    """``{"step": 4, "outcome": "oom"}``, or ``"kill"``: how the attempt named in ``attempt`` ends early."""
    size: int = 1000
    best_step: int | None = None
    """Whose validation is said to have been the best."""
    still_s: float = 0.0
    """For how long its heartbeats say that it has got nowhere."""
    says: str = ""
    """Printed at each step, behind its number."""
    load_s: float = 0.0
    """Before the first step; a stop that comes meanwhile is answered at once."""
    save_s: float = 0.0
    """That writing a checkpoint takes."""
    deaf: bool = False
    """It ignores SIGTERM."""
    each_stored: bool = False
    """It waits after a checkpoint until a file ``stored`` holds its step, or a later one: a follower on a busy machine misses none."""

    def write(self, work_dir: Path) -> None:
        work_dir.mkdir(parents=True, exist_ok=True)
        (work_dir / "scenario.json").write_text(json.dumps(self.__dict__))


def main(path: Path) -> None:
    run = RunFile.read(path)
    scenario = Scenario(**json.loads((run.work_dir / "scenario.json").read_text()))
    stopping: list[int] = []

    def stop(signum: int, _: FrameType | None) -> None:
        if not scenario.deaf:
            stopping.append(signum)

    signal.signal(signal.SIGTERM, stop)
    (run.work_dir / "visible_devices").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "unset"))
    step, state = _resume(run)
    loaded_at = time.time() + scenario.load_s
    while time.time() < loaded_at:
        if stopping:
            _leave(run, Outcome.PREEMPTED, step, scenario)
        time.sleep(0.02)
    metrics = MetricsLog(run.work_dir / "metrics.jsonl")
    metrics.keep_through(step)
    while step < scenario.steps:
        step += 1
        state = hashlib.sha256(f"{state}{step}".encode()).hexdigest()
        loss = 1.0 / step
        if scenario.says:
            sys.stdout.write(f"step {step} {scenario.says}\n")
            sys.stdout.flush()
        metrics.append({"step": step, "total_steps": scenario.steps, "loss": loss, "tokens_per_s": 9.0, "time": time.time()})
        now = time.time()
        beat = {"time": now, "progress_at": now - scenario.still_s, "phase": "train", "step": step, "attempt": run.attempt}
        write_json(run.work_dir / "heartbeat.json", beat)
        if step % scenario.every == 0 or stopping:
            _save(run, step, state, scenario, run.work_dir / "checkpoints" / checkpoints.step_name(step))
            while scenario.each_stored and not stopping and _stored(run) < step:
                time.sleep(0.02)
        if stopping:
            _leave(run, Outcome.PREEMPTED, step, scenario)
        early = scenario.end_at
        if early.get("step") == step and early.get("attempt", run.attempt) == run.attempt:
            if early["outcome"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            _leave(run, Outcome(early["outcome"]), step, scenario)
        while scenario.hold_at == step and not (run.work_dir / "go").exists() and not stopping:
            time.sleep(0.02)
        time.sleep(scenario.step_s)
    _save(run, step, state, scenario, run.work_dir / "final", required=checkpoints.ADAPTER)
    _leave(run, Outcome.SUCCEEDED, step, scenario)


def _resume(run: RunFile) -> tuple[int, str]:
    found = checkpoints.latest_valid_checkpoint(run.work_dir / "checkpoints", run.spec, required=checkpoints.RESUMABLE)
    if found is None:
        return 0, ""
    body = json.loads((found / checkpoints.TRAINER_STATE).read_text())
    return int(body["step"]), str(body["state"])


def _stored(run: RunFile) -> int:
    path = run.work_dir / "stored"
    return int(path.read_text() or 0) if path.exists() else 0


def _save(
    run: RunFile, step: int, state: str, scenario: Scenario, target: Path, *, required: tuple[str, ...] = checkpoints.RESUMABLE
) -> None:
    def write(directory: Path) -> None:
        time.sleep(scenario.save_s)
        (directory / "adapter_model.safetensors").write_text(state * (scenario.size // 64 + 1))
        (directory / "adapter_config.json").write_text("{}")
        if required is checkpoints.RESUMABLE:
            for name in ("optimizer.pt", "schedule.pt"):
                (directory / name).write_text(f"{name} {state}" * (scenario.size // 64 + 1))
            (directory / checkpoints.TRAINER_STATE).write_text(json.dumps({"step": step, "state": state, "best_step": scenario.best_step}))

    metrics = {"num_tokens": 10 * step, "loss": 1.0 / step, "best_step": scenario.best_step}
    commit(target, write, spec=run.spec, step=step, attempt=run.attempt, created_at=time.time(), metrics=metrics, required=required)
    if required is checkpoints.RESUMABLE:
        checkpoints.retain(target.parent, run.spec.checkpoint.keep_last, keep_step=scenario.best_step)


def _leave(run: RunFile, outcome: Outcome, step: int, scenario: Scenario) -> None:
    body = {"outcome": str(outcome), "step": step, "total_steps": scenario.steps, "message": f"it ended as {outcome}"}
    detail = {"per_device_batch_size": run.spec.optimization.per_device_batch_size}
    write_json(run.work_dir / f"exit-a{run.attempt}.json", {**body, "trained_tokens": 10 * step, "detail": detail}, durable=True)
    sys.exit(EXIT_CODES[outcome])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
