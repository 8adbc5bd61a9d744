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
