"""Which processes a running stack consists of, read from the stack itself."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from agent.prewarmed_trainer import NAME
from resources.launcher.process_identity import alive

WORK = ("run worker", "trainer", "agent", "watcher")
"""Processes of one job; they come and go with it. A run worker executes its steps in its own process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Processes:
    """Reads the supervisor's report, the records of the run server and of the launcher, and the process table; keeps nothing."""

    home: Path

    def report(self) -> dict[str, Any]:
        """The supervisor's report; empty while there is none."""
        try:
            body: dict[str, Any] = json.loads((self.home / "stack.json").read_text())
            return body
        except (FileNotFoundError, ValueError):
            return {}

    def services(self) -> dict[str, int]:
        """Pid of each running service, the supervisor and PostgreSQL's own server, in the order of their start."""
        report = self.report()
        found = {"supervisor": int(report["pid"])} if report else {}
        found |= {s["name"]: int(s["pid"]) for s in report.get("services", ()) if s["pid"]}
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            server = psutil.Process(int((self.home / "postgres" / "postmaster.pid").read_text().split()[0]))
            if server.name() == "postgres":  # another process may have its pid by now
                found["postgres server"] = server.pid
        return found

    def is_ready(self) -> bool:
        return bool(self.report().get("phase") == "ready")

    def service_of(self, name: str) -> dict[str, Any]:
        """What the report says of the service that `name` belongs to; empty while there is no report."""
        name = "postgres" if name == "postgres server" else name
        return next((s for s in self.report().get("services", ()) if s["name"] == name), {})

    def of_jobs(self) -> dict[str, dict[int, str]]:
        """Pids by kind (:data:`WORK`), each with its workload's name; of a run worker, the run."""
        found: dict[str, dict[int, str]] = {kind: {} for kind in WORK}
        for record in (self.home / "runs").glob("*.json"):
            if worker := _alive(record):
                found["run worker"][worker.pid] = record.stem
        for record in (self.home / "work" / "launcher").glob("*/*.json"):
            kind = {"process.json": "agent", "watcher.json": "watcher"}.get(record.name)
            if kind is None or not (process := _alive(record)):
                continue
            name = record.parent.name
            found[kind][process.pid] = name
            if kind == "agent":
                with contextlib.suppress(psutil.Error):
                    found["trainer"] |= {p.pid: name for p in process.children(recursive=True) if _trains(p)}
        return found

    def all_of_home(self) -> dict[int, str]:
        """Every process that has this home in its command line, environment or working directory: pid and command line."""
        found, home = {}, str(self.home)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if home in process.cwd() or any(home in w for w in words) or process.environ().get("FT_HOME") == home:
                    found[process.pid] = f"{process.name()}: {' '.join(words)[:120]}"
        return found


def _alive(record: Path) -> psutil.Process | None:
    """The process that a record names, unless it has ended: its pid may be that of another process by now, or of a thread of one."""
    with contextlib.suppress(psutil.Error, OSError, ValueError):
        recorded = json.loads(record.read_text())
        return psutil.Process(recorded["pid"]) if alive(recorded["pid"], recorded["identity"]) else None
    return None


def _trains(process: psutil.Process) -> bool:
    """Whether it is a rank of a training: below torchrun, or forked with its imports done."""
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        return process.name() == NAME or ("engine.training.runtime" in words and "torch.distributed.run" not in words)
    return False
