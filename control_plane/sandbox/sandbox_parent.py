"""Runs work on a tenant's data in a child process, so that the server survives its memory use and its crashes.

The child is a module that calls :func:`control_plane.sandbox.sandbox_child.main`. It leads a process group, which is killed when it
exceeds its memory or time limit, makes no progress for long, or loses its parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control_plane.sandbox import scratch
from control_plane.sandbox.sandbox_child import FAILURE, ORDER, PROGRESS, RESULT
from control_plane.sandbox.task_validate import Order
from core.durable_files import write_json
from core.errors import FtError, Unavailable, family
from core.typed_json import from_json
from engine.data import IngestResult, PassProgress

CRASHED = "validation_crashed"
"""Error code for a child that died or was killed: the platform is at fault, and the file may be retried."""
VALIDATOR = "control_plane.sandbox.task_validate"
REPOSITORY = Path(__file__).resolve().parents[2]
PASSED_ON = ("PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONHASHSEED", "NUMBA_CACHE_DIR")
"""Other variables are not passed on: they include database URLs, API keys and cloud credentials."""
POLL_S = 0.1
SILENT_FOR_S = 900.0
"""Seconds without any progress after which a child counts as hung; the longest silent stage of 10M rows, the writing of
duplicates' verdicts, takes a tenth of it."""
WALL_BASE_S = 120.0
"""Base time limit of every file: a hundred times what the start of a child and a small file take."""
SLOWEST_BYTES_PER_S = 500_000
"""A thirtieth of what one core validates of 1 KB chat rows (15,000 a second): a busy machine, a slow tokenizer, every check on."""
LOG_BYTES = 2000
"""Bytes from the end of a dead child's output that go to the operator's log."""
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits at which a child is killed."""

    wall_s: float
    memory_bytes: int = 3 * GIB
    """Of all its processes: half as much again as the 2 GiB in which 10M rows are validated."""
    silent_for_s: float = SILENT_FOR_S


def wall_s(num_bytes: int) -> float:
    """Return the time limit for validating `num_bytes` uncompressed bytes."""
    return WALL_BASE_S + num_bytes / SLOWEST_BYTES_PER_S


def validate_sandboxed(
    order: Order, directory: Path, *, limits: Limits, progress: Callable[[PassProgress], None] | None = None
) -> IngestResult:  # fmt: skip
    """Carry out `order` in a child process that works in `directory`."""
    try:
        found = run_sandboxed(VALIDATOR, order.to_dict(), directory, limits=limits, what=order.filename, progress=progress)
        return from_json(IngestResult, found)
    except Unavailable as error:
        if error.code != Unavailable.default_code:
            raise
        raise FtError(error.message, code=CRASHED) from error  # one of its workers died


def run_sandboxed(
    module: str, order: Mapping[str, Any], directory: Path, *, limits: Limits, what: str,
    progress: Callable[[PassProgress], None] | None = None, secret: str = "", environment: Sequence[str] = (),
    command: Sequence[str] = (),
) -> Mapping[str, Any]:  # fmt: skip
    """Run `module` as a child process in `directory` and return its result for `order`.

    Raises the child's ``FtError``; one with code `CRASHED` says how the child died. `secret` goes through a pipe, never into a file.
    `environment` names variables to pass on in addition to `PASSED_ON`. No process of the child is left, whatever happens.
    """
    write_json(directory / ORDER, order)
    with (directory / "log").open("wb") as log:
        child = subprocess.Popen(
            [*(command or (sys.executable, "-m", module)), str(directory)], stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True, env=_environment(environment), cwd=directory,
        )  # fmt: skip
    assert child.stdin is not None
    try:
        with contextlib.suppress(BrokenPipeError):  # it died at once; its exit is reported below
            child.stdin.write(f"{json.dumps(secret)}\n".encode())
            child.stdin.flush()
        _watch(child, directory, what, limits, progress)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
    return _answer(child.returncode, directory, what)


def _watch(
    child: subprocess.Popen[bytes], directory: Path, what: str, limits: Limits, progress: Callable[[PassProgress], None] | None
) -> None:
    started_at = last_output_at = time.monotonic()
    seen = ""
    while child.poll() is None:
        time.sleep(POLL_S)
        with contextlib.suppress(OSError):
            if (text := (directory / PROGRESS).read_text()) != seen:
                seen, last_output_at = text, time.monotonic()
                if progress is not None:
                    progress(PassProgress(**json.loads(text)))
        if (used := used_bytes(child.pid, at_least=limits.memory_bytes)) > limits.memory_bytes:
            allowed = f"{limits.memory_bytes / GIB:.3g} GiB of memory that one file may take"
            raise FtError(f"{what} needed {used / GIB:.3g} GiB, more than the {allowed}, and its reading was ended", code=CRASHED)
        if (now := time.monotonic()) - last_output_at > limits.silent_for_s:
            raise FtError(f"the reading of {what} made no progress for {limits.silent_for_s:g} s and was ended", code=CRASHED)
        if now - started_at > limits.wall_s:
            raise FtError(f"{what} was not read within the {limits.wall_s:.0f} s that a file of its size may take", code=CRASHED)


def _answer(returncode: int, directory: Path, what: str) -> Mapping[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        answer: Mapping[str, Any] = json.loads((directory / RESULT).read_text())
        return answer
    with contextlib.suppress(OSError, ValueError, KeyError):
        failure = json.loads((directory / FAILURE).read_text())
        kind = {c.__name__: c for c in family()}[failure["class"]]
        raise kind(failure["message"], code=failure["code"], param=failure["param"])
    raise _crashed(returncode, directory, what)


def _crashed(returncode: int, directory: Path, what: str) -> FtError:
    if scratch.is_full(directory):
        return scratch.disk_full(directory)
    how = f"exit code {returncode}"
    if returncode < 0:
        how = f"signal {signal.Signals(-returncode).name}"
        how += ", as when memory runs out" if returncode == -signal.SIGKILL else ""
    end = (directory / "log").read_bytes()[-LOG_BYTES:].decode(errors="replace").strip()
    error = FtError(f"the process that read {what} died ({how})", code=CRASHED)
    error.add_note(end or "it left no output")
    return error


def _environment(also: Sequence[str]) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k in PASSED_ON or k in also or k.startswith("LC_")}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])}


PROC = Path("/proc")
KIB = 1 << 10


def used_bytes(group: int, *, at_least: int) -> int:
    """Return the anonymous and shared memory of the processes in `group`; 0 without ``/proc``.

    The quick sum counts a shared page once for each process. Only if it reaches `at_least` is the exact sum computed, which walks every
    page table.
    """
    pids = _members(group)
    quick = sum(_kib(p, "status", "RssAnon:", "RssShmem:") for p in pids) * KIB
    if quick < at_least:
        return quick
    exact = sum(_kib(p, "smaps_rollup", "Pss_Anon:", "Pss_Shmem:") for p in pids) * KIB
    return exact or quick


def _members(group: int) -> list[int]:
    try:
        pids = [int(name) for name in (p.name for p in PROC.iterdir()) if name.isdecimal()]
    except OSError:  # not Linux
        return []
    return [pid for pid in pids if _group_of(pid) == group]


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:  # process has ended
        return None


def _kib(pid: int, file: str, *names: str) -> int:
    try:
        lines = (PROC / str(pid) / file).read_text().splitlines()
    except OSError:  # process has ended
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(names))
