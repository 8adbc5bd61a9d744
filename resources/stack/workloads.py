"""Ends training and evaluation workloads when the stack goes down: they checkpoint on SIGTERM and resume when it is up again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from control_plane.protocols import WorkloadPhase
from control_plane.settings import Settings
from resources.launcher import LocalLauncher

GRACE_S = 30.0
"""A checkpoint has 25 s after SIGTERM, and then the process has to exit."""
LIVE = (WorkloadPhase.PENDING, WorkloadPhase.RUNNING)


def running(settings: Settings) -> list[str]:
    """Names of the workloads that run under this home."""
    directory = settings.work_dir / "launcher"
    if not directory.is_dir():
        return []
    launcher = LocalLauncher(directory)
    names = sorted(d.name for d in directory.iterdir() if (d / "workload.json").exists())
    return [n for n in names if launcher.status(n).phase in LIVE]


def stop_all(settings: Settings) -> list[str]:
    """Stop every running workload, all at once; returns their names."""
    names = running(settings)
    if not names:
        return []
    launcher = LocalLauncher(settings.work_dir / "launcher")
    with ThreadPoolExecutor(max_workers=len(names)) as executor:
        list(executor.map(lambda n: launcher.stop(n, grace_s=GRACE_S), names))
    return names
