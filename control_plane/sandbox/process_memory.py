"""Memory that this process may use, and memory that a process group uses.

Usage is read from ``/proc`` because ``RLIMIT_AS`` limits address space, and numba, Arrow and memory maps reserve far more of it than they
use. File-backed pages do not count: the kernel reclaims them when it needs to.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Limit files of cgroups version 2 and version 1, at the paths where a container sees its own."""
PROC = Path("/proc")
KIB = 1 << 10


def host_bytes() -> int:
    """Return the smaller of the machine's memory and the control group's limit."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            found = min(found, int(file.read_text()))
    return found


def used_bytes(group: int, *, at_least: int) -> int:
    """Return the anonymous and shared memory of the processes in `group`; 0 without ``/proc``.

    The quick sum counts a shared page once for each process. Only if it reaches `at_least` is the exact sum computed, which walks every
    page table.
    """
    pids = _members(group)
    quick = sum(_kib(p, "status", "RssAnon:", "RssShmem:") for p in pids) * KIB
    if quick < at_least:
        return quick
    exact = sum(_kib(p, "smaps_rollup", "Pss_Anon:", "Pss_Shmem:") for p in pids) * KIB
    return exact or quick


def _members(group: int) -> list[int]:
    try:
        pids = [int(name) for name in (p.name for p in PROC.iterdir()) if name.isdecimal()]
    except OSError:  # not Linux
        return []
    return [pid for pid in pids if _group_of(pid) == group]


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:  # process has ended
        return None


def _kib(pid: int, file: str, *names: str) -> int:
    try:
        lines = (PROC / str(pid) / file).read_text().splitlines()
    except OSError:  # process has ended
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(names))
