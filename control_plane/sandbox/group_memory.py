"""Memory of a process group, read from ``/proc``: a limit that holds where ``RLIMIT_AS`` would be too blunt.

Address space is no measure here: numba, Arrow and memory maps reserve much more of it than they use. Pages of files are not
counted, for the kernel takes those back when it needs them.
"""

from __future__ import annotations

import os
from pathlib import Path

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
