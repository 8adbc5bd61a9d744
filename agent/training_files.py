"""What a training process writes while it runs: metric lines and heartbeats. The process does not know who reads them."""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.messages import Reported

STUCK_AFTER_S = 600.0
"""Seconds without progress, even with heartbeats, after which a process is stopped and resumed: no micro-batch, validation window or
save."""
STUCK_AFTER_STEPS = 20
"""The same in usual steps, if they are slow."""
LOADING_S = 1800.0
"""The same while a big model is read or written, which reports no progress."""
MAX_SILENT_S = {
    "setup": LOADING_S,
    "import": LOADING_S,
    "reference": LOADING_S,
    "load": LOADING_S,
    "self_test": STUCK_AFTER_S,
    "train": STUCK_AFTER_S,
    "save": LOADING_S,
}
KEPT_STEPS = 50
Line = Mapping[str, Any]


@dataclass(kw_only=True)
class Metrics:
    """The job's ``metrics.jsonl``, read as it grows; of accepted lines only steps and times are kept.

    A resume rewrites the file. Until then it also holds steps that an earlier attempt made after its last checkpoint; those are lost, and
    older than `since`.
    """

    path: Path
    from_step: int
    """Step from which the attempt resumed: lines up to it are of earlier attempts."""
    since: float
    """Unix seconds at which the attempt began."""
    _file: tuple[int, int] = (0, 0)
    """Inode, and the bytes that were read."""
    _steps: array[int] = field(default_factory=lambda: array("q"))
    """Optimizer steps of this attempt."""
    _times: array[float] = field(default_factory=lambda: array("d"))
    """When each of them ended, in Unix seconds."""
    _first_s: float = 0.0
    """Seconds of the first of them."""
    _waiting: list[Line] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self) -> None:
        """Read what was added."""
        try:
            with self.path.open("rb") as file, self._lock:
                stat = os.fstat(file.fileno())
                inode, offset = self._file
                if stat.st_ino != inode or stat.st_size < offset:
                    offset = 0
                    self._steps, self._times, self._waiting = array("q"), array("d"), []
                file.seek(offset)
                whole = file.read().rpartition(b"\n")[0]
                self._file = (stat.st_ino, offset + (len(whole) + 1 if whole else 0))
                for text in whole.split(b"\n"):
                    if text:
                        self._add(json.loads(text))
        except FileNotFoundError:
            return

    def _add(self, line: Line) -> None:
        own = line["step"] > self.from_step
        if own and line["time"] < self.since:
            return
        self._waiting.append(line)
        if own and "loss" in line:
            if not self._steps:
                self._first_s = float(line.get("step_s", 0.0))
            self._steps.append(line["step"])
            self._times.append(line["time"])

    def unsent(self, accepted: Reported) -> Sequence[Line]:
        """Return the lines that were not accepted, in order: this attempt's, and earlier ones that its checkpoint contains."""
        with self._lock:
            newest = {"loss": accepted.step, "eval_loss": accepted.validation}
            self._waiting = [m for m in self._waiting if any(name in m and m["step"] > newest[name] for name in newest)]
            return list(self._waiting)

    @property
    def last_step(self) -> int:
        return self._steps[-1] if self._steps else self.from_step

    def newest_times(self, num: int) -> Sequence[float]:
        """Return when the newest `num` steps ended."""
        return self._times[-num:]

    def seconds_after(self, step: int) -> float:
        """Return the seconds that this attempt spent on the steps after `step`."""
        with self._lock:
            index = bisect_right(self._steps, step)
            if index == len(self._steps):
                return 0.0
            return max(0.0, self._times[-1] - (self._times[index - 1] if index else self._times[0] - self._first_s))

    def began_at(self) -> float | None:
        """Return when the first step of this attempt began. If it took longer than the second, the excess counts as warm-up."""
        with self._lock:
            if not self._times:
                return None
            took = self._first_s if len(self._times) == 1 else min(self._first_s, self._times[1] - self._times[0])
            return self._times[0] - took

    def ended_at(self, step: int) -> float | None:
        """Return when this attempt ended `step`."""
        with self._lock:
            index = bisect_left(self._steps, step)
            return self._times[index] if index < len(self._steps) and self._steps[index] == step else None


@dataclass(kw_only=True)
class Liveness:
    """Signs of life of the training process of one attempt."""

    path: Path
    """Its ``heartbeat.json``; an earlier attempt may have left one."""
    attempt: int
    timeout_s: float
    """Seconds without a heartbeat after which the process counts as hung."""
    started_at: float
    _times: Sequence[float] = ()

    def saw(self, times: Sequence[float]) -> None:
        """Learn how long a step usually takes; `times`: when the newest steps ended."""
        self._times = times

    def phase(self) -> str:
        """The phase in the heartbeat of this attempt; empty before its first one."""
        beat = self._heartbeat()
        return str(beat.get("phase", "")) if beat.get("attempt") == self.attempt else ""

    def silence_s(self) -> float:
        """Return the seconds since the last heartbeat; before the first one, since the start."""
        try:
            last = self.path.stat().st_mtime
        except FileNotFoundError:
            last = 0.0
        return time.time() - max(last, self.started_at)

    def is_silent(self) -> bool:
        return self.silence_s() > self.timeout_s

    def stall(self) -> str | None:
        """Return why the running process counts as hung; None if it does not."""
        if self.is_silent():
            return f"no heartbeat for {self.silence_s():.0f} s (at most {self.timeout_s:g})"
        beat = self._heartbeat()
        phase, moved = str(beat.get("phase", "")), beat.get("progress_at")
        if phase not in MAX_SILENT_S or beat.get("attempt") != self.attempt or not isinstance(moved, int | float):
            return None
        still, limit = time.time() - moved, max(MAX_SILENT_S[phase], STUCK_AFTER_STEPS * self._step_s())
        return (
            f"no progress for {still:.0f} s (at most {limit:.0f}) in phase {phase}, although heartbeats arrive" if still > limit else None
        )

    def _step_s(self) -> float:
        took = [b - a for a, b in zip(self._times, self._times[1:], strict=False)]
        return statistics.median(took) if took else 0.0

    def _heartbeat(self) -> Mapping[str, Any]:
        try:
            body = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return body if isinstance(body, dict) else {}
