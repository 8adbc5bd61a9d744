"""Ends a process with its parent, by the kernel: a worker that outlived it would hold memory, or write where another works."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


def die_with(parent: int) -> bool:
    """Has this process killed when `parent` dies (Linux only); returns False if it is already dead."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent
