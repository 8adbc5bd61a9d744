"""Ends workloads when the stack goes down: trainings checkpoint on SIGTERM, and all resume when it is up again."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from control_plane.platform.protocols import WorkloadPhase
from control_plane.platform.settings import Settings
from core.workload import Kind, Workload
from engine.training import committed_checkpoints
from resources.launcher import LocalGangs, prewarmed

GRACE_S = 30.0
"""A checkpoint may take 25 s after SIGTERM, and then the process has to exit."""
LIVE = (WorkloadPhase.PENDING, WorkloadPhase.RUNNING)


def running(settings: Settings) -> list[str]:
    """Return the names of this home's running workloads."""
    directory = settings.work_dir / "launcher"
    if not directory.is_dir():
        return []
    return [status.name for status in LocalGangs(directory).list() if status.phase in LIVE]


def describe_stopped(settings: Settings, names: Sequence[str]) -> str:
    """Say which workloads were stopped and from where each resumes; empty without `names`."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_describe_resume(settings, name), []).append(name)
    return "; ".join(f"{what}: {', '.join(of)}" for what, of in groups.items())


def _describe_resume(settings: Settings, name: str) -> str:
    workload = Workload.from_json((settings.work_dir / "launcher" / name / "workload.json").read_text())
    if workload.kind is Kind.EVALUATE:
        return "stopped evaluations (keep their answers and continue when the stack is up again)"
    if workload.kind is Kind.EXPORT:
        return "stopped exports (made again when the stack is up again)"
    saved = committed_checkpoints(settings.work_dir / "jobs" / workload.job / "checkpoints")
    if saved:
        return "stopped training (resumes from its last checkpoint when the stack is up again)"
    return "stopped training before its first checkpoint (starts over when the stack is up again)"


def stop_all(settings: Settings) -> list[str]:
    """Stop every running workload, all at once, and the process that waits for the next one; returns the workloads' names."""
    prewarmed.end(settings.work_dir / "launcher")
    names = running(settings)
    if not names:
        return []
    launcher = LocalGangs(settings.work_dir / "launcher")
    with ThreadPoolExecutor(max_workers=len(names)) as executor:
        list(executor.map(lambda n: launcher.stop(n, grace_s=GRACE_S), names))
    return names
