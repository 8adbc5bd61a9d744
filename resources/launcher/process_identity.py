"""Identities of recorded processes: pids are reused, so a start time and the boot id are recorded with each."""

from __future__ import annotations

import os
from pathlib import Path

import psutil


def identity(pid: int) -> str | None:
    """Return an identity that distinguishes this process from a later one with the same pid; None if it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None if Path("/proc/self/stat").exists() else _portable(pid)
    fields = stat.rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):
        return None
    return f"{fields[19]}@{_boot()}"


def alive(pid: int, recorded: str | None) -> bool:
    """Whether the recorded process still runs; False if it ended before its identity could be recorded."""
    return recorded is not None and identity(pid) == recorded


def group_alive(leader: int) -> bool:
    """Whether `leader` is gone but members of its process group are alive; a group's id is not reused while it has members."""
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
    """Return the identity on systems without /proc."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.2f}"
    except psutil.Error:
        return None
