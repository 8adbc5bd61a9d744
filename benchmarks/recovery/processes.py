"""Which processes a running stack consists of, read from the stack itself."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from agent.workload import VARIABLE

WORK = ("run worker", "trainer", "agent", "watcher")
"""Processes of one job; they come and go with it. A run worker executes its steps in its own process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Processes:
    """Reads the supervisor's report, the run server's records and the process table; keeps nothing."""

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
        with contextlib.suppress(OSError, ValueError):
            found["postgres server"] = int((self.home / "postgres" / "postmaster.pid").read_text().split()[0])
        return found

    def is_ready(self) -> bool:
        return bool(self.report().get("phase") == "ready")

    def service_of(self, name: str) -> dict[str, Any]:
        """What the report says of the service that `name` belongs to; empty while there is no report."""
        name = "postgres" if name == "postgres server" else name
        return next((s for s in self.report().get("services", ()) if s["name"] == name), {})

    def of_jobs(self) -> dict[str, dict[int, str]]:
        """Pids by kind (:data:`WORK`), each with what it works for: ``job/attempt's file``, of a run's processes the run."""
        found: dict[str, dict[int, str]] = {kind: {} for kind in WORK}
        for record in (self.home / "runs").glob("*.json"):
            with contextlib.suppress(psutil.Error, OSError, ValueError):
                worker = psutil.Process(int(json.loads(record.read_text())["pid"]))
                found["run worker"][worker.pid] = record.stem
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if words[-2:] == ["-m", "agent"] and str(self.home) in (workload := process.environ().get(VARIABLE, "")):
                    found["agent"][process.pid] = Path(workload).parent.name
                if not any(str(self.home) in word for word in words):
                    continue
                if "ft_assets.training.runtime" in words and "torch.distributed.run" not in words:
                    found["trainer"][process.pid] = f"{Path(words[-1]).parent.name}/{Path(words[-1]).stem}"
                elif "resources.launcher.workload_watcher" in words:
                    found["watcher"][process.pid] = Path(words[-1]).name
        return found
