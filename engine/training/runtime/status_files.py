"""Status files of a run: heartbeat, metrics, exit evidence. Each is written atomically."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.durable_files import write_json
from engine.training.failures import Outcome
from engine.training.runtime.topology import Topology

RESERVE = ".reserve"
RESERVE_BYTES = 128 << 10
HEARTBEAT_S = 2.0
"""Seconds between heartbeats, well within the 5 s that readers assume, even on a busy machine."""


@dataclass(kw_only=True)
class Progress:
    """Progress of the run. Written by the training thread, read by the heartbeat."""

    phase: str = "setup"
    step: int = 0
    total_steps: int = 0
    num_tokens: int = 0
    """Tokens of all windows trained on, including earlier attempts."""
    committed_step: int = 0
    ended_early: bool = False
    """Early stopping ended the run before its last step."""
    started_at: float = field(default_factory=time.time)
    first_step_s: float | None = None
    """Seconds from the start of the process to the end of its first step."""
    train_began_at: float | None = None
    progress_at: float = field(default_factory=time.time)
    """When the training thread last made progress: the heartbeat has its own thread and proves nothing about it."""

    def touch(self) -> None:
        """Records progress of the training thread: a micro-batch, a validation window, a checkpoint."""
        self.progress_at = time.time()

    @property
    def train_s(self) -> float:
        return 0.0 if self.train_began_at is None else time.time() - self.train_began_at


class Heartbeat:
    """A thread that rewrites ``heartbeat.json`` and calls `on_beat`. ``beat`` writes the file immediately."""

    def __init__(self, path: Path, progress: Progress, *, attempt: int, on_beat: Callable[[], None]) -> None:
        self._path, self._progress, self._attempt, self._on_beat = path, progress, attempt, on_beat
        self._lock = threading.RLock()  # a signal handler that leaves also beats, possibly in the middle of a beat
        self._stopped = threading.Event()

    def start(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.beat()
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def enter(self, phase: str) -> None:
        """Changes the phase and writes it immediately."""
        self._progress.phase = phase
        self._progress.touch()
        self.beat()

    def beat(self) -> None:
        p = self._progress
        body = {"time": time.time(), "progress_at": p.progress_at, "phase": p.phase, "step": p.step}
        body |= {"total_steps": p.total_steps, "attempt": self._attempt}
        with self._lock, contextlib.suppress(OSError):  # a temporarily full disk must not end the thread
            write_json(self._path, body)

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(HEARTBEAT_S):
            self.beat()
            self._on_beat()


class MetricsLog:
    """``metrics.jsonl``: one line per optimizer step, even across interruptions and resumes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def keep_through(self, step: int) -> None:
        """Drops lines of later steps, which a resume will write again, and a torn last line."""
        if not self._path.exists():
            return
        kept = [line for line in self._path.read_text().splitlines() if (_step_of(line) or step + 1) <= step]
        draft = self._path.with_suffix(".tmp")
        draft.write_text("".join(f"{line}\n" for line in kept))
        draft.replace(self._path)

    def append(self, body: Mapping[str, Any]) -> None:
        with self._path.open("a") as f:
            f.write(json.dumps(body) + "\n")


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


def write_exit(
    work_dir: Path, progress: Progress, *, attempt: int, here: Topology, outcome: Outcome, message: str, detail: Mapping[str, Any]
) -> None:
    """Writes ``exit-a<N>.json``; a rank other than the first of its node writes its own file, and only about a failure of its own."""
    if not here.leads_node and outcome in (Outcome.SUCCEEDED, Outcome.PREEMPTED):
        return
    name = f"exit-a{attempt}.json" if here.leads_node else f"exit-a{attempt}.rank{here.rank}.json"
    body = {
        "outcome": str(outcome),
        "step": progress.step,
        "total_steps": progress.total_steps,
        "message": message,
        "trained_tokens": progress.num_tokens,
        "train_s": round(progress.train_s, 3),
        "detail": {"first_step_s": progress.first_step_s, "committed_step": progress.committed_step, **detail},
    }
    try:
        write_json(work_dir / name, body, durable=True)
    except OSError:  # no space: the reserve was held for this
        (work_dir / RESERVE).unlink(missing_ok=True)
        write_json(work_dir / name, body, durable=True)


def reserve_space(work_dir: Path) -> None:
    """Reserves a little disk space, so that a run that ends because the disk is full can still record it."""
    with contextlib.suppress(OSError):
        (work_dir / RESERVE).write_bytes(b"\0" * RESERVE_BYTES)
