"""The child's side of ``isolation``: it is told everything in a file and answers in files, and ends with its parent.

``order.json`` in its directory is its order, ``result.json`` what came of it, ``failure.json`` an error of our family; meanwhile
``progress.json`` says how far it is. Standard input brings one line with a secret, or an empty one, and closes when the
parent is gone.
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

from ft_assets.datasets.pass_progress import Progress
from ft_assets.errors import FtError

ORDER, RESULT, FAILURE, PROGRESS = "order.json", "result.json", "failure.json", "progress.json"
OOM_SCORE = "1000"
"""Of this process (``/proc/self/oom_score_adj``): short of memory, the kernel ends it before anything else."""

Work = Callable[[Mapping[str, Any], str, Callable[[Progress], None]], Mapping[str, Any]]
"""From the order, the secret and a sink for progress to the result."""


def main(work: Work) -> None:
    """Carry out the order in the directory that is the only argument."""
    directory = Path(sys.argv[1])
    secret = json.loads(_line())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _offer_to_oom_killer()
    order = json.loads((directory / ORDER).read_text())
    try:
        result = work(order, secret, lambda p: write_whole(directory / PROGRESS, asdict(p)))
    except FtError as error:
        write_whole(directory / FAILURE, {**error.to_dict(), "class": type(error).__name__})
        return
    write_whole(directory / RESULT, result)


def write_whole(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON beside and rename: who reads sees all of it, or what was there before."""
    beside = path.with_name(f".{path.name}")
    beside.write_text(json.dumps(value))
    beside.replace(path)


def _line() -> bytes:
    """The first line of standard input, and nothing behind it."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


def _end_with_parent() -> None:
    """Wait for the end of standard input, then end this process and its workers: it leads a group of its own."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def _offer_to_oom_killer() -> None:
    with contextlib.suppress(OSError):  # no Linux, or not allowed: then the kernel chooses as it likes
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
