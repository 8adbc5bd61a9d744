"""Starting training, evaluation and other workloads so that they outlive whoever asked for them."""

from resources.launcher.local_processes import LocalLauncher

__all__ = ["LocalLauncher"]
