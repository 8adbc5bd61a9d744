"""One training process and what it leaves behind: ``metrics.jsonl``, exit evidence, its log."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.process_group import training_command
from engine.training import checkpoints
from engine.training.spec import RunFile, TrainingSpec

REPOSITORY = Path(__file__).parents[2]
POLL_S = 0.1
LOG_TAIL = 3000


class OutOfTime(Exception):
    """The case did not get done within its budget."""


class Failed(Exception):
    """The training process ended otherwise than it should."""


@dataclass(kw_only=True)
class Job:
    """Attempts in one work directory, against one deadline."""

    root: Path
    spec: TrainingSpec
    base: Path
    pack: Path
    deadline: float
    """By ``time.monotonic``."""
    on_cpu: bool
    number: int = 0
    started_at: float = 0.0
    process: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def work(self) -> Path:
        return self.root / "work"

    def start(self) -> None:
        self.number += 1
        path = self.root / f"run-a{self.number}.json"
        RunFile(spec=self.spec, attempt=self.number, base_model_dir=self.base, pack_dir=self.pack, work_dir=self.work).write(path)
        paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        if self.on_cpu:
            env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self.started_at = time.time()
        with (self.root / f"log-a{self.number}").open("wb") as log:
            ranks = self.spec.world_size
            command = training_command("engine.training.runtime", path, num_processes=ranks, node=0, num_nodes=1, leader="")
            self.process = subprocess.Popen(command, env=env, cwd=self.root, stdout=log, stderr=subprocess.STDOUT)

    def steps(self) -> list[dict[str, Any]]:
        """Lines of finished steps; one that is being written is left out."""
        path = self.work / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in lines if "loss" in line]

    def await_step(self, step: int) -> list[dict[str, Any]]:
        """Until a step of at least this number is done by the present attempt; ``Failed`` if the process ends before."""
        while True:
            over = self._running().poll() is not None
            found = self.steps()
            if found and found[-1]["step"] >= step and found[-1]["time"] >= self.started_at:
                return found
            if over:
                raise Failed(f"ended at step {found[-1]['step'] if found else 0}: {self.why()}")
            self._sleep()

    def checkpoint(self, step: int) -> Path:
        return self.work / "checkpoints" / checkpoints.step_name(step)

    def await_checkpoint(self, step: int) -> None:
        """Until the checkpoint of `step` is complete; ``Failed`` if the process ends before."""
        while not self.checkpoint(step).exists():
            if self._running().poll() is not None:
                raise Failed(f"ended before the checkpoint of step {step}: {self.why()}")
            self._sleep()

    def await_end(self) -> dict[str, Any]:
        """Its exit evidence."""
        while self._running().poll() is None:
            self._sleep()
        path = self.work / f"exit-a{self.number}.json"
        if not path.exists():
            raise Failed(f"left no evidence: {self.why()}")
        body: dict[str, Any] = json.loads(path.read_text())
        return body

    def terminate(self) -> None:
        self._running().send_signal(signal.SIGTERM)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def why(self) -> str:
        """The last words of the process."""
        path = self.work / f"exit-a{self.number}.json"
        if path.exists():
            body = json.loads(path.read_text())
            return f"{body['outcome']}: {body['message']}"
        return (self.root / f"log-a{self.number}").read_text(errors="replace")[-LOG_TAIL:]

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            raise RuntimeError("no attempt was started")
        return self.process

    def _sleep(self) -> None:
        if time.monotonic() > self.deadline:
            self.kill()
            found = self.steps()
            raise OutOfTime(f"its time was over at step {found[-1]['step'] if found else 0}; last words: {self.why()[-400:]}")
        time.sleep(POLL_S)
