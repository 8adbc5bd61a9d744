"""Starts training, evaluation and other workloads that outlive the process that started them."""

import os
import sys
from pathlib import Path

from control_plane.platform.protocols import Launcher
from control_plane.platform.settings import Settings
from resources.launcher.gangs import LocalGangs
from resources.launcher.local_processes import LocalLauncher


def open_launcher(settings: Settings) -> Launcher:
    """Return the launcher of this installation."""
    return open_gangs(settings.work_dir / "launcher")


def open_gangs(directory: Path) -> LocalGangs:
    """Return the launcher with its state in `directory`. Only a local stack prewarms: ``ft down`` ends the process that waits."""
    return LocalGangs(directory, prewarms=sys.platform == "linux" and "FT_STACK_ID" in os.environ)


__all__ = ["LocalGangs", "LocalLauncher", "open_gangs", "open_launcher"]
