"""How much memory this process can have: of its control group where that has a limit, else of the machine."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Of version 2 and of version 1; a container sees its own there."""


def host_bytes() -> int:
    """The smaller of the machine's memory and the limit of the control group."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            found = min(found, int(file.read_text()))
    return found


PROC = Path("/proc")
KIB = 1 << 10


def used_bytes(group: int, *, at_least: int) -> int:
    """Anonymous and shared memory of the processes of `group`; 0 where the system does not tell.

    Pages that processes share are counted for each of them in the quick sum, and rightly where that sum reaches `at_least`:
    the exact one walks every page table.
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
    except OSError:  # no Linux
        return []
    return [pid for pid in pids if _group_of(pid) == group]


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:  # it has ended
        return None


def _kib(pid: int, file: str, *names: str) -> int:
    try:
        lines = (PROC / str(pid) / file).read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(names))
