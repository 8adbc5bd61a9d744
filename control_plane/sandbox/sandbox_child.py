"""The child process of the sandbox: reads its order from a file, writes its answer to files, and ends with its parent.

In its directory, ``order.json`` is the order, ``progress.json`` the progress, and ``result.json`` the result or ``failure.json`` an
``FtError``. Standard input brings one line with a secret, which may be empty, and closes when the parent is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from core.durable_files import write_json
from core.errors import FtError
from engine.data import PassProgress

ORDER, RESULT, FAILURE, PROGRESS = "order.json", "result.json", "failure.json", "progress.json"
OOM_SCORE = "1000"
"""Value for ``/proc/self/oom_score_adj``: if memory runs out, the kernel kills this process first."""

Work = Callable[[Mapping[str, Any], str, Callable[[PassProgress], None]], Mapping[str, Any]]
"""Takes the order, the secret and a callback for progress; returns the result."""


def main(work: Work) -> None:
    """Carry out the order in the directory that the only command-line argument names."""
    directory = Path(sys.argv[1])
    secret = json.loads(_line())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _offer_to_oom_killer()
    order = json.loads((directory / ORDER).read_text())
    try:
        result = work(order, secret, lambda p: write_json(directory / PROGRESS, asdict(p)))
    except FtError as error:
        write_json(directory / FAILURE, {**error.to_dict(), "class": type(error).__name__})
        return
    write_json(directory / RESULT, result)


def _line() -> bytes:
    """Read the first line of standard input, and nothing after it."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


def _end_with_parent() -> None:
    """Wait for the end of standard input, then kill this process's group, which includes its workers."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def _offer_to_oom_killer() -> None:
    with contextlib.suppress(OSError):  # not Linux, or not permitted
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
