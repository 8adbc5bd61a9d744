"""Progress of an evaluation: ``heartbeat.json`` and ``milestones.jsonl``, for the agent that supervises it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from core.durable_files import write_json
from engine.evals.run.run_status import HEARTBEAT_NAME, MILESTONES_NAME, read_heartbeat, read_milestones

HEARTBEAT_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    phase: str = "setup"
    subject: str | None = None
    suite: str | None = None
    done: int = 0
    """Answered requests, of all subjects together."""
    total: int | None = None
    """Requests to be answered; None: not known yet."""
    steps: int = 0
    """Steps of generation so far: a batch of long answers takes many minutes, and only this moves meanwhile."""


class Heart:
    """Writes ``heartbeat.json`` from its own thread during the work."""

    def __init__(self, out_dir: Path, *, beside: Sequence[Path] = ()) -> None:
        """`beside`: directories of other replicas, whose answers and steps are counted too."""
        self._path, self._beside = out_dir / HEARTBEAT_NAME, beside
        self._beat = Beat()
        self._began, self._generated, self._steps = time.monotonic(), 0, 0
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._beat_on, daemon=True)

    def plan(self, total: int) -> None:
        """Starts counting: `total` requests are to be answered, by all subjects together."""
        self._beat = replace(self._beat, total=total)

    def phase(self, phase: str, *, subject: str | None = None, suite: str | None = None) -> None:
        self._beat = replace(self._beat, phase=phase, subject=subject, suite=suite)
        if not self._generated:
            self._began = time.monotonic()
        self._write()

    def answered(self, num: int, *, generated: bool) -> None:
        """Counts `num` more answered requests; not `generated`: the answer was already known."""
        self._generated += num if generated else 0
        self._beat = replace(self._beat, done=self._beat.done + num)

    def step(self) -> None:
        """Counts a step of generation."""
        self._steps += 1

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _beat_on(self) -> None:
        self._write()
        while not self._stop.wait(HEARTBEAT_S):
            self._write()

    def _write(self) -> None:
        with self._lock:
            beats = [read_heartbeat(place) for place in self._beside]
            others, steps = (sum(int(beat.get(key) or 0) for beat in beats) for key in ("done", "steps"))
            beat = replace(self._beat, done=self._beat.done + others, steps=self._steps + steps)
            write_json(self._path, {"time": time.time(), **asdict(beat), "eta_s": self._eta_s(beat, self._generated + others)})

    def _eta_s(self, beat: Beat, generated: int) -> float | None:
        """Returns the seconds that the rest takes at the pace so far."""
        left = (beat.total or 0) - beat.done
        return round(left * (time.monotonic() - self._began) / generated, 1) if self._generated and left >= 0 else None


class Milestones:
    """Writes ``milestones.jsonl``: each completed part once, however often the run is started again.

    ``{"kind": "planned", "subjects": [...], "suites": {id: items}}``, then for each suite that a subject has answered ``{"kind":
    "answered", "subject", "suite", "num_items", "seconds", "cached"}``.
    """

    def __init__(self, out_dir: Path) -> None:
        self._path = out_dir / MILESTONES_NAME
        self._passed = {_key(m) for m in read_milestones(out_dir)}
        whole = self._path.read_bytes() if self._path.exists() else b""
        if not whole.endswith(b"\n") and whole:  # torn
            os.truncate(self._path, whole.rfind(b"\n") + 1)

    def passed(self, kind: str, **facts: Any) -> None:
        milestone = {"kind": kind, **facts}
        if _key(milestone) in self._passed:
            return
        with self._path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(milestone) + "\n")
        self._passed.add(_key(milestone))


def _key(milestone: Mapping[str, Any]) -> tuple[Any, ...]:
    return (milestone["kind"], milestone.get("subject"), milestone.get("suite"))
