"""The capability suites that jobs may be evaluated with, as set up by the operator."""

from __future__ import annotations

from control_plane.platform.context import Platform
from ft_assets.evals.config import EvalConfig
from ft_assets.evals.suites import task_files
from ft_assets.evals.suites.task_files import Listed


def listing(platform: Platform) -> list[Listed]:
    """Return every suite by name, ready or with the reason why not."""
    settings = platform.settings
    return task_files.listing(settings.eval_task_dirs, settings.eval_data_dir)


def check(platform: Platform, asked: EvalConfig) -> None:
    """Refuse a suite that is unknown or not ready, before a job that needs it costs anything."""
    settings = platform.settings
    names = settings.eval_suites if asked.capability is None else asked.capability
    if names and "capability" not in asked.skip:
        task_files.check(names, settings.eval_task_dirs, settings.eval_data_dir)
