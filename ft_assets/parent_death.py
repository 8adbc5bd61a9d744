"""Has the kernel end a process with its parent: a worker that outlived it would hold memory, or write where another works."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


def die_with(parent: int) -> bool:
    """Have this process killed when `parent` dies (on Linux; elsewhere nothing is done); False where that is dead already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent
