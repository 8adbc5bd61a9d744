"""One stack per home directory: a file lock that is released with its holder, and cleanup after a killed stack."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from core.errors import Conflict
from deploy.local.supervisor import child_process
from deploy.local.supervisor import stack_report as report
from deploy.local.supervisor.stack_report import ServiceReport, StackReport
from resources.dagster import run_records
from resources.launcher.process_identity import alive

LEFTOVER_GRACE_S = 10.0
"""Seconds that a leftover process group gets to end by itself, as a service does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StackFiles:
    """The supervisor's files under the home directory."""

    home: Path

    @property
    def lock(self) -> Path:
        return self.home / "up.lock"

    @property
    def report(self) -> Path:
        return self.home / "stack.json"

    @property
    def logs(self) -> Path:
        return self.home / "logs"

    @property
    def endpoints(self) -> Path:
        return self.home / "endpoints.json"


@contextmanager
def held(files: StackFiles) -> Iterator[None]:
    """Hold the lock of this home; raises ``Conflict`` that names its holder. The kernel releases it however the holder ends.

    It is tried for half a second, because :func:`is_held` of another process has the lock for an instant.
    """
    files.home.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(files.lock).acquire(timeout=0.5)
    except Timeout:
        who = report.read(files.report)
        pid = f" (pid {who.pid})" if who else ""
        raise Conflict(
            f"the stack in {files.home} is already running{pid}; `ft status` shows it and `ft down` ends it", code="already_running"
        ) from None
    with lock:
        yield


def is_held(files: StackFiles) -> bool:
    """Whether a supervisor of this home is running."""
    if not files.lock.exists():  # it, and its directory, would be created
        return False
    try:
        with FileLock(files.lock).acquire(blocking=False):
            return False
    except Timeout:
        return True


def leftovers(stale: StackReport) -> list[ServiceReport]:
    """Return the services of a dead supervisor that still have live processes."""
    return [s for s in stale.services if s.pid is not None and _members(s.pid, s.identity, stale.stack_id)]


def _members(pgid: int, recorded: str | None, stack_id: str) -> list[int]:
    """Return the live processes of the recorded group; a group with a reused id has no process with our stack's id."""
    if alive(pgid, recorded):
        return [pgid]
    found = []
    for p in psutil.process_iter(["pid"]):
        try:
            if os.getpgid(p.pid) == pgid and p.environ().get("FT_STACK_ID") == stack_id and p.status() != psutil.STATUS_ZOMBIE:
                found.append(p.pid)
        except (psutil.Error, ProcessLookupError):
            continue
    return found


def end_leftovers(files: StackFiles, stale: StackReport) -> tuple[list[ServiceReport], list[str]]:
    """End what a killed supervisor left running, last started first; returns the services and the runs that were ended.

    Forked runs, each in a session of its own, end before the stack's first service, which serves them (the database).
    """
    found = leftovers(stale)
    first = [s for s in found if s == stale.services[0]]
    for s in reversed(found[len(first) :]):
        _end_group(s, stale.stack_id)
    runs = run_records.end_all(run_records.runs_of(files.home))
    for s in first:
        _end_group(s, stale.stack_id)
    return found, runs


def _end_group(s: ServiceReport, stack_id: str) -> None:
    assert s.pid is not None
    child_process.kill_group(s.pid, signal.SIGTERM)
    deadline = time.monotonic() + LEFTOVER_GRACE_S
    while _members(s.pid, s.identity, stack_id):
        if time.monotonic() > deadline:
            child_process.kill_group(s.pid, signal.SIGKILL)
            return
        time.sleep(0.1)


def end_unrecorded(home: Path) -> list[int]:
    """End services of this home that no report names: started just before their supervisor was killed, or by another version of it.

    A service has ``FT_STACK_ID`` and this ``FT_HOME`` in its environment, and leads a session of its own. The database's server is left
    to its next owner, who adopts it: on SIGTERM it would wait for its clients.
    """
    own = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter(["pid"]):
        try:
            environ = process.environ()
            leads = os.getsid(process.pid) == process.pid and process.pid not in own and not process.name().startswith("postgres")
        except (psutil.Error, ProcessLookupError, PermissionError):
            continue
        if leads and environ.get("FT_STACK_ID") and Path(environ.get("FT_HOME", "")) == home:
            child_process.kill_group(process.pid, signal.SIGTERM)
            found.append(process)
    for process in psutil.wait_procs(found, timeout=LEFTOVER_GRACE_S)[1]:
        child_process.kill_group(process.pid, signal.SIGKILL)
    return [process.pid for process in found]


def clean_stale(files: StackFiles) -> str | None:
    """Under the lock: remove what a killed supervisor left behind. Returns a sentence about it, None when there was nothing."""
    stale = report.read(files.report)
    if stale is None:
        files.endpoints.unlink(missing_ok=True)
        unrecorded = end_unrecorded(files.home)
        return f"ended services of an earlier stack that no report names: pids {unrecorded}" if unrecorded else None
    ended, runs = end_leftovers(files, stale)
    end_unrecorded(files.home)
    files.report.unlink(missing_ok=True)
    files.endpoints.unlink(missing_ok=True)
    what = f"ended what it had left running: {report.names(ended)}" if ended else "nothing of it was left running"
    of_runs = f"; ended {len(runs)} of its runs" if runs else ""
    return f"the stack of pid {stale.pid} had gone without cleaning up (killed, or the machine restarted); {what}{of_runs}"
