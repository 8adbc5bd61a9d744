"""The supervisor's report: a document that it writes to ``<home>/stack.json`` and sends to the process that started it."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Phase(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"
    """Some services serve; the supervisor keeps trying to start the others."""
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class ServiceState(enum.StrEnum):
    WAITING = "waiting"
    STARTING = "starting"
    UP = "up"
    DONE = "done"
    """A one-shot step that has succeeded."""
    REPLACING = "replacing"
    """It does not answer or can not become ready: it has been asked to end, and is killed after a short grace."""
    RESTARTING = "restarting"
    STOPPING = "stopping"
    DOWN = "down"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceReport:
    name: str
    state: ServiceState
    detail: str = ""
    pid: int | None = None
    identity: str | None = None
    """Identity of process `pid`, which distinguishes it from a later one with the same pid, even after a clock change."""
    url: str | None = None
    log: str = ""
    since: float | None = None
    """Unix seconds of the present state's begin."""
    restarts: int = 0
    one_shot: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StackReport:
    stack_id: str
    """In the environment of every child as ``FT_STACK_ID``."""
    phase: Phase
    pid: int
    identity: str | None
    since: float
    services: tuple[ServiceReport, ...]
    error: str | None = None
    message: str | None = None
    """News since the last report: a restart, leftovers that were cleaned."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def from_json(text: str) -> StackReport:
    data: dict[str, Any] = json.loads(text)
    services = tuple(ServiceReport(**{**s, "state": ServiceState(s["state"])}) for s in data.pop("services"))
    return StackReport(**{**data, "phase": Phase(data["phase"]), "services": services})


def read(path: Path) -> StackReport | None:
    """Read the report at `path`; None if it is absent or another version wrote it."""
    try:
        return from_json(path.read_text())
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def names(services: Sequence[ServiceReport]) -> str:
    return ", ".join(f"{s.name} (pid {s.pid})" for s in services)
