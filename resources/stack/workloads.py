"""Ends training and evaluation workloads when the stack goes down: they checkpoint on SIGTERM and resume when it is up again."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from control_plane.protocols import WorkloadPhase
from control_plane.settings import Settings

GRACE_S = 30.0
"""A checkpoint has 25 s after SIGTERM, and then the process has to exit."""


def stop_all(settings: Settings, *, say: Callable[[str], None] = print) -> list[str]:
    """Stop every workload that runs under this home, all at once; returns their names."""
    directory = settings.work_dir / "launcher"
    if not directory.is_dir() or importlib.util.find_spec("resources.launcher") is None:
        return []
    from resources.launcher import LocalLauncher

    launcher = LocalLauncher(directory)
    names = sorted(d.name for d in directory.iterdir() if (d / "workload.json").exists())
    running = [n for n in names if launcher.status(n).phase in (WorkloadPhase.RUNNING, WorkloadPhase.PENDING)]
    if not running:
        return []
    say(f"ending {', '.join(running)}: a checkpoint is written first")
    with ThreadPoolExecutor(max_workers=len(running)) as executor:
        list(executor.map(lambda n: launcher.stop(n, grace_s=GRACE_S), running))
    return running
