"""Processes that are stopped and cannot react."""

from __future__ import annotations

import os
import signal

import psutil

from tests.support.jobs.followed_jobs import until


def freeze_group(leader: int) -> None:
    """Stop a process group that runs Python, and wait until its processes have stopped: a signal that comes before that is handled first.

    A shell that has just forked, and waits until its child runs another program, cannot stop, but can be ended.
    """
    until(lambda: any(process.info["name"].startswith("python") for process in _members(leader)))
    os.killpg(leader, signal.SIGSTOP)
    until(lambda: all(process.info["status"] in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE) for process in _members(leader)))


def _members(leader: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["name", "status"]):
        try:
            if os.getpgid(process.pid) == leader:
                found.append(process)
        except ProcessLookupError:
            continue
    return found
