"""``ft`` in the test's own process: a process of its own takes up to two seconds to start and import, for every command."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType
from typing import Any

import pytest

from core.telemetry import logs
from ft_client.cli import main


def run_ft(*args: str, env: Mapping[str, str], cwd: Path, stdin: str = "") -> CompletedProcess[str]:
    """Calls the entry point of the ``ft`` script; what its process would have of its own is restored afterwards.

    An exception that would end the process with a traceback is raised. Start a process to test what only a process shows: what is
    imported, signals, a terminal, a closed pipe, two commands at once, what children write.
    """
    assert threading.current_thread() is threading.main_thread(), "the environment belongs to all threads: one command at a time"
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    of_the_process = {
        "argv": ["ft", *args],
        "stdin": io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"),
        "stdout": out,
        "stderr": err,
        "excepthook": sys.excepthook,  # typer sets its own
    }
    before = _process_wide()
    with _environment(env), contextlib.chdir(cwd), pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "__main__", ModuleType("__main__"))  # a script's: usage errors name `ft` and not `python -m pytest`
        for name, value in of_the_process.items():
            patch.setattr(sys, name, value)
        for name in logs.PACKAGES:  # a handler that Dagster's definitions left would write what the test's server logs among what `ft` says
            patch.setattr(logging.getLogger(name), "handlers", [])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    assert _process_wide() == before, "a command leaves the process as it was, or needs one of its own"
    return CompletedProcess(["ft", *args], code, _text(out), _text(err))


@contextlib.contextmanager
def _environment(env: Mapping[str, str]) -> Iterator[None]:
    """Exactly the variables of `env` until the end, then those of before."""
    before = dict(os.environ)
    try:
        _set_variables(env)
        yield
    finally:
        _set_variables(before)


def _set_variables(wanted: Mapping[str, str]) -> None:
    """Changes those alone that differ: other threads read the environment meanwhile."""
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _process_wide() -> dict[str, Any]:
    """What commands may not change for good: handlers of signals and of the log, and the mode of new files."""
    mask, root = os.umask(0o077), logging.getLogger()
    os.umask(mask)
    signals = {s: signal.getsignal(s) for s in signal.valid_signals()}
    return {"signals": signals, "log": (root.level, list(root.handlers)), "umask": mask}


def _text(stream: io.TextIOWrapper) -> str:
    stream.flush()
    written = stream.buffer
    assert isinstance(written, io.BytesIO)
    return written.getvalue().decode()
