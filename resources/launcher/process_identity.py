"""Which process a recorded pid meant: pids are used again, so a start time and the boot go with each."""

from __future__ import annotations

import os
from pathlib import Path

import psutil


def identity(pid: int) -> str | None:
    """What tells this process from a later one of the same pid; None if it is gone or only waits to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None if Path("/proc/self/stat").exists() else _portable(pid)
    fields = stat.rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):
        return None
    return f"{fields[19]}@{_boot()}"


def alive(pid: int, recorded: str | None) -> bool:
    """Whether the process that was recorded still runs; one that ended before it could be recorded does not."""
    return recorded is not None and identity(pid) == recorded


def group_alive(leader: int) -> bool:
    """Whether members of the process group of `leader` live on after it; a group's id is not reused before that."""
    if psutil.pid_exists(leader) and identity(leader) is not None:
        return False
    for process in psutil.process_iter(["status"]):
        try:
            if os.getpgid(process.pid) == leader and process.info["status"] != psutil.STATUS_ZOMBIE:
                return True
        except (ProcessLookupError, PermissionError):
            continue
    return False


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _portable(pid: int) -> str | None:
    """The same without /proc."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.2f}"
    except psutil.Error:
        return None
