"""Processes that are stopped and cannot react."""

from __future__ import annotations

import os
import signal

import psutil

from tests.support.jobs.followed_jobs import until


def freeze_group(leader: int) -> None:
    """Stop a process group, and wait until its processes have: a signal that is sent before that is handled first."""
    members = [process for process in psutil.process_iter() if _group(process.pid) == leader]
    os.killpg(leader, signal.SIGSTOP)
    until(lambda: all(not process.is_running() or process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE) for process in members))


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None
