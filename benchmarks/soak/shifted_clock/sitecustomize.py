"""Gives each Python process of a soaked stack a clock of its own: libfaketime (LD_PRELOAD) reads its shift from a file per process.

The variable is set in the C environment alone, so that neither children nor ``os.environ`` inherit the file of another process.
libfaketime 0.9.10 fails clock_nanosleep with EINVAL where the monotonic clock is left alone: sleeping is done by select.
"""

import ctypes
import os
import select
import time

_CLOCKS = os.environ.get("FT_SOAK_CLOCKS", "")


def _name_own_file() -> None:
    ctypes.CDLL(None).setenv(b"FAKETIME_TIMESTAMP_FILE", f"{_CLOCKS}/{os.getpid()}".encode(), 1)


def _sleep(seconds: float) -> None:
    if seconds < 0:
        raise ValueError("sleep length must be non-negative")
    select.select((), (), (), seconds)


if _CLOCKS:
    _name_own_file()
    os.register_at_fork(after_in_child=_name_own_file)
    time.sleep = _sleep
