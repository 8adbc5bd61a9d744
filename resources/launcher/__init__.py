"""Starts training, evaluation and other workloads that outlive the process that started them."""

import os
import sys
from functools import cache
from pathlib import Path

from control_plane.platform.protocols import Launcher
from control_plane.platform.settings import Settings
from resources.launcher.gangs import LocalGangs
from resources.launcher.local_processes import LocalLauncher


def open_launcher(settings: Settings) -> Launcher:
    """Return the launcher of this installation: Jobs of a cluster with ``FT_EXECUTOR=k8s``, else processes of this machine."""
    if not on_kubernetes():
        return open_gangs(settings.work_dir / "launcher")
    return _of_the_cluster(os.getpid(), settings)


def open_gangs(directory: Path) -> LocalGangs:
    """Return this machine's launcher, with its state in `directory`. Only a local stack prewarms: ``ft down`` ends what waits."""
    return LocalGangs(directory, prewarms=sys.platform == "linux" and "FT_STACK_ID" in os.environ)


def on_kubernetes() -> bool:
    """Whether workloads run on a cluster."""
    return os.environ.get("FT_EXECUTOR") == "k8s"


@cache
def _of_the_cluster(_pid: int, settings: Settings) -> Launcher:
    from resources.launcher import kubernetes_cluster  # the client takes half a second to import

    return kubernetes_cluster.launcher(settings)


__all__ = ["LocalGangs", "LocalLauncher", "on_kubernetes", "open_gangs", "open_launcher"]
