"""What a training process writes while it runs: metric lines and heartbeats. The process does not know who reads them."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    "load": LOADING_S,
    "self_test": STUCK_AFTER_S,
    "train": STUCK_AFTER_S,
    "save": LOADING_S,
}
KEPT_STEPS = 50
Line = Mapping[str, Any]


@dataclass(kw_only=True)
class Metrics:
    """The job's ``metrics.jsonl``. A resume rewrites the file, so lines are tracked by step, not by offset.

    Until then the file also holds steps that an earlier attempt made after its last checkpoint; those are lost, and older than `since`.
    """

    path: Path
    from_step: int
    """Step from which the attempt resumed: lines up to it are of earlier attempts."""
    since: float
    """Unix seconds at which the attempt began."""
    lines: Sequence[Line] = ()
    """Of this attempt, and those of earlier ones that its checkpoint contains."""
    _seen: tuple[int, int] = (0, 0)

    def read(self) -> None:
        """Read the file if it has changed."""
        try:
            stat = self.path.stat()
            if self._seen == (stat.st_mtime_ns, stat.st_size):
                return
            text = self.path.read_text()
        except FileNotFoundError:
            return
        self._seen = (stat.st_mtime_ns, stat.st_size)
        found = [json.loads(line) for line in text.split("\n")[:-1] if line]
        self.lines = [m for m in found if m["step"] <= self.from_step or m["time"] >= self.since]

    @property
    def steps(self) -> list[Line]:
        """Lines of this attempt's optimizer steps."""
        return [m for m in self.lines if "loss" in m and m["step"] > self.from_step]

    @property
    def last_step(self) -> int:
        return max((m["step"] for m in self.steps), default=self.from_step)

    def seconds_after(self, step: int) -> float:
        """Return the seconds that this attempt spent on the steps after `step`."""
        after = [m for m in self.steps if m["step"] > step]
        if not after:
            return 0.0
        before = [m["time"] for m in self.steps if m["step"] <= step]
        return max(0.0, float(after[-1]["time"] - max(before, default=after[0]["time"] - after[0].get("step_s", 0.0))))

    def began_at(self) -> float | None:
        """Return when the first step of this attempt began. If it took longer than the second, the excess counts as warm-up."""
        mine = self.steps
        if not mine:
            return None
        took = float(mine[0].get("step_s", 0.0))
        return float(mine[0]["time"]) - (took if len(mine) == 1 else min(took, float(mine[1]["time"] - mine[0]["time"])))

    def ended_at(self, step: int) -> float | None:
        """Return when this attempt ended `step`."""
        return max((float(m["time"]) for m in self.steps if m["step"] == step), default=None)


@dataclass(kw_only=True)
class Liveness:
    """Signs of life of the training process of one attempt."""

    path: Path
    """Its ``heartbeat.json``; an earlier attempt may have left one."""
    attempt: int
    timeout_s: float
    """Seconds without a heartbeat after which the process counts as hung."""
    started_at: float
    _times: list[float] = field(default_factory=list)
    """When the newest steps ended."""

    def saw(self, steps: Sequence[Line]) -> None:
        """Process metric lines, to learn how long a step usually takes."""
        self._times = [float(m["time"]) for m in steps][-KEPT_STEPS:]

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
