"""Runs a module as ``python -m`` does, in a process forked from one that has imported torch and its libraries already.

A fresh interpreter needs five CPU seconds for these imports, a forked one none. The parent is the standard library's fork server:
one for each process of pytest, started with the first module that is run, and gone with pytest.

What differs from a fresh interpreter, so that a test that is about it needs one: imports have happened (with their warnings, and what they
read of the environment), the hash seed and the command line are the parent's, and so is the parent process.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Read where libraries are loaded, so by the parent."""
PRELOADED = "tests.preloaded_training"


class Forked:
    """What tests use of ``subprocess.Popen``, for a process that is a child of the fork server."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid: int = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.returncode) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return code

    def send_signal(self, signum: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(module: str, arguments: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path) -> Forked:
    """``python -m MODULE ARGUMENTS``; stdout and stderr are written to `log`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ONE_THREAD.items():
            patch.setenv(name, value)
        forkserver.ensure_running()
    process = context.Process(target=_run, name=module, args=(module, list(arguments), dict(env), cwd, log))
    process.start()
    return Forked(process)


def _run(module: str, arguments: list[str], env: dict[str, str], cwd: Path, log: Path) -> None:
    """In the child: become what a fresh interpreter would be, then run the module's own code."""
    with log.open("wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
