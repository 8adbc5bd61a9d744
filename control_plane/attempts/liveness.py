"""Whether a workload lives and gets anywhere, from its heartbeat: a thread beats, and the training thread says when it last moved."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from control_plane.platform.protocols import WorkloadPhase, WorkloadStatus

STUCK_AFTER_S = 600.0
"""Seconds without progress, heartbeat or not, after which a workload is ended and resumed: no micro-batch, validation window or save."""
STUCK_AFTER_STEPS = 20
"""The same in usual steps, where they are slow."""
LOADING_S = 1800.0
"""The same where a big model is read or written, and nothing counts it."""
PATIENCE_S = {
    "setup": LOADING_S,
    "import": LOADING_S,
    "load": LOADING_S,
    "self_test": STUCK_AFTER_S,
    "train": STUCK_AFTER_S,
    "save": LOADING_S,
}
KEPT_STEPS = 50


@dataclass(kw_only=True)
class Liveness:
    """Signs of life of one attempt's workload."""

    path: Path
    """Its ``heartbeat.json``; an attempt before it may have left one."""
    attempt: int
    timeout_s: float
    """Seconds without a heartbeat after which a workload is stopped and resumed: ``FT_HEARTBEAT_TIMEOUT_S``."""
    _times: list[float] = field(default_factory=list)
    """When the newest steps ended."""

    def saw(self, steps: Sequence[Mapping[str, Any]]) -> None:
        """Take in metric lines: how long a step usually takes."""
        self._times = [*self._times, *(float(m["time"]) for m in steps)][-KEPT_STEPS:]

    def phase(self) -> str:
        """Of this attempt; empty before its first heartbeat."""
        beat = self._heartbeat()
        return str(beat.get("phase", "")) if beat.get("attempt") == self.attempt else ""

    def silence_s(self, status: WorkloadStatus) -> float:
        """Seconds since the workload last gave a sign of life; before its first heartbeat, since its start."""
        try:
            last = self.path.stat().st_mtime
        except FileNotFoundError:
            last = 0.0
        return time.time() - max(last, status.started_at or time.time())

    def last_sign(self) -> float | None:
        """When this attempt last beat; None where it never did."""
        try:
            last = self.path.stat().st_mtime
        except FileNotFoundError:
            return None
        return last if self._heartbeat().get("attempt") == self.attempt else None

    def is_silent(self, status: WorkloadStatus) -> bool:
        """Whether a running workload has missed its heartbeats for too long."""
        return status.phase is WorkloadPhase.RUNNING and self.silence_s(status) > self.timeout_s

    def stall(self, status: WorkloadStatus) -> str | None:
        """What tells that a running workload hangs; None where nothing does."""
        if status.phase is not WorkloadPhase.RUNNING:
            return None
        if self.is_silent(status):
            return f"no heartbeat for {self.silence_s(status):.0f} s (at most {self.timeout_s:g})"
        beat = self._heartbeat()
        phase, moved = str(beat.get("phase", "")), beat.get("progress_at")
        if phase not in PATIENCE_S or beat.get("attempt") != self.attempt or not isinstance(moved, int | float):
            return None
        still, limit = time.time() - moved, max(PATIENCE_S[phase], STUCK_AFTER_STEPS * self._step_s())
        return f"no progress for {still:.0f} s (at most {limit:.0f}) in phase {phase}, though it beats" if still > limit else None

    def _step_s(self) -> float:
        took = [b - a for a, b in zip(self._times, self._times[1:], strict=False)]
        return statistics.median(took) if took else 0.0

    def _heartbeat(self) -> Mapping[str, Any]:
        try:
            body = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return body if isinstance(body, dict) else {}
