"""Starts training, evaluation and other workloads that outlive the process that started them."""

from control_plane.platform.protocols import Launcher
from control_plane.platform.settings import Settings
from resources.launcher.gangs import LocalGangs
from resources.launcher.local_processes import LocalLauncher


def open_launcher(settings: Settings) -> Launcher:
    """Return the launcher of this installation."""
    return LocalGangs(settings.work_dir / "launcher")


__all__ = ["LocalGangs", "LocalLauncher", "open_launcher"]
