"""Starts training, evaluation and other workloads that outlive the process that started them."""

from resources.launcher.local_processes import LocalLauncher

__all__ = ["LocalLauncher"]
