"""Runs a validation in a child process, so that neither its memory nor its death is that of the server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from control_plane.service.validate_file import ORDER, PROGRESS, RESULT, Order, Validated, write_whole
from ft_assets.datasets.progress import Progress
from ft_assets.errors import FtError

CRASHED = "validation_crashed"
"""Of a validation that died: the platform is at fault, and the file may be validated again."""
MODULE = "control_plane.service.validate_file"
REPOSITORY = Path(__file__).resolve().parents[2]
PASSED_ON = ("PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONHASHSEED", "NUMBA_CACHE_DIR")
"""The rest of the environment stays here: database URLs, API keys and cloud credentials are there."""
POLL_S = 0.1
SILENT_FOR_S = 900.0
"""Seconds without any progress after which a validation counts as hung; the longest silent stage of 10M rows, the writing of
duplicates' verdicts, takes a tenth of it."""
LOG_BYTES = 2000
"""Of the end of a dead child's output, for the operator's log."""


def carry_out_apart(
    order: Order, directory: Path, *, progress: Callable[[Progress], None] | None = None, silent_for_s: float = SILENT_FOR_S,
    command: Sequence[str] = (sys.executable, "-m", MODULE),
) -> Validated:  # fmt: skip
    """Carry out `order` by a child that works in `directory`; an ``FtError`` with the code `CRASHED` says how it died.

    Whatever happens here, no process of it is left: it leads a group, which is killed at the end.
    """
    write_whole(directory / ORDER, order.to_dict())
    with (directory / "log").open("wb") as log:
        child = subprocess.Popen(
            [*command, str(directory)], stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            env=_environment(), cwd=directory,
        )  # fmt: skip
    try:
        _watch(child, directory, progress, silent_for_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        if child.stdin is not None:
            child.stdin.close()
    try:
        return Validated(**json.loads((directory / RESULT).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise _crashed(child.returncode, directory, order.filename) from error


def _watch(child: subprocess.Popen[bytes], directory: Path, progress: Callable[[Progress], None] | None, silent_for_s: float) -> None:
    seen, heard_at = "", time.monotonic()
    while child.poll() is None:
        time.sleep(POLL_S)
        with contextlib.suppress(OSError):
            if (said := (directory / PROGRESS).read_text()) != seen:
                seen, heard_at = said, time.monotonic()
                if progress is not None:
                    progress(Progress(**json.loads(said)))
        if time.monotonic() - heard_at > silent_for_s:
            raise FtError(f"the validation made no progress for {silent_for_s:g} s and was ended", code="validation_crashed")


def _crashed(returncode: int, directory: Path, filename: str) -> FtError:
    how = f"exit code {returncode}"
    if returncode < 0:
        how = f"signal {signal.Signals(-returncode).name}"
        how += ", as when memory runs out" if returncode == -signal.SIGKILL else ""
    end = (directory / "log").read_bytes()[-LOG_BYTES:].decode(errors="replace").strip()
    error = FtError(f"the process that validated {filename} died ({how})", code="validation_crashed")
    error.add_note(end or "it left no output")
    return error


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k in PASSED_ON or k.startswith("LC_")}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])}
