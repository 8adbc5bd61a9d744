"""Turns a forked process into what ``python -m MODULE`` would be: its imports have happened, and nothing else is left of its parent."""

from __future__ import annotations

import ctypes
import os
import random
import runpy
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PR_SET_NAME = 15
"""From linux/prctl.h."""
IGNORABLE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What a forked process is to run."""

    name: str
    """Of the process, in ``ps -o comm`` and ``top``: its command line is its parent's."""
    argv: Sequence[str]
    """After ``python -m``."""
    env: Mapping[str, str]
    cwd: str


class Forked(BaseException):
    """Raised in a forked process, where only its order may go on: it unwinds the parent's calls, and then :func:`become` runs the order."""

    def __init__(self, order: Order, output: int) -> None:
        super().__init__()
        self.order, self.output = order, output


def become(order: Order, output: int) -> None:
    """Run the order in this process; it writes to file descriptor `output`."""
    for signum in (*IGNORABLE, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    os.environ.clear()
    os.environ.update(order.env)
    os.chdir(order.cwd)
    tempfile.tempdir = None
    random.seed()
    sys.argv = list(order.argv)
    if not sys.flags.safe_path:
        sys.path[0] = order.cwd
    ctypes.CDLL(None).prctl(PR_SET_NAME, order.name.encode(), 0, 0, 0)
    runpy.run_module(order.argv[0], run_name="__main__", alter_sys=True)
