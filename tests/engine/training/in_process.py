"""Trainings within the test's own process: a whole run of the tiny model takes a fraction of a second, an interpreter five."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.training.runtime import pack_loader
from engine.training.runtime.run_errors import Preempted
from engine.training.runtime.status_files import Heartbeat, Progress
from engine.training.runtime.stop_request import StopRequest
from engine.training.runtime.train import run
from engine.training.spec import RunFile
from tests.support.models.tiny_model import VOCAB


class StopAtPoll(StopRequest):
    """Asked to stop once the loop has looked `polls` times: at the start, in the middle, or at the end of any step."""

    def __init__(self, polls: int | None) -> None:
        super().__init__(leave=lambda why: None)
        self.left = polls

    @property
    def requested(self) -> bool:
        if self.left is None:
            return False
        self.left -= 1
        return self.left < 0


@dataclass(kw_only=True)
class Training:
    """A job whose attempts run here, one after the other, in one work directory."""

    run_file: RunFile
    vocab_size: int = VOCAB
    attempts: int = 0
    details: list[dict[str, Any]] = field(default_factory=list)

    def attempt(self, *, stop_at_poll: int | None = None) -> bool:
        """Train until the end or until the stop; whether it ended."""
        self.attempts += 1
        given = replace(self.run_file, attempt=self.attempts)
        given.work_dir.mkdir(parents=True, exist_ok=True)
        progress = Progress()
        stop = StopAtPoll(stop_at_poll)
        heartbeat = Heartbeat(given.work_dir / "heartbeat.json", progress, attempt=self.attempts, on_beat=lambda: None)
        pack = pack_loader.load(given.pack_dir, given.spec, vocab_size=self.vocab_size)
        try:
            self.details.append(run(given, pack, vocab_size=self.vocab_size, progress=progress, heartbeat=heartbeat, stop=stop))
        except Preempted:
            return False
        return True

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_file.work_dir / "metrics.jsonl").read_text().splitlines()]

    def trajectory(self) -> list[dict[str, Any]]:
        """What must be the same: all of the metrics but times, speeds and memory."""
        timed = ("time", "tokens_per_s", "steps_per_s", "step_s", "data_s", "memory_bytes", "gpu_utilization", "mfu", "validation_s")
        return [{k: v for k, v in line.items() if k not in timed} for line in self.lines()]

    def final(self) -> dict[str, bytes]:
        directory: Path = self.run_file.work_dir / "final"
        return {p.name: p.read_bytes() for p in sorted(directory.iterdir()) if p.name != "manifest.json"}
