"""Disk space of a node: what its jobs' directories hold that can be fetched again."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from core.errors import FtError, IntegrityError, Unavailable
from engine.training import NO_SPACE, committed_checkpoints, discard_draft, read_manifest, step_name

LOCK = ".lock"
LOCK_WAIT_S = 30.0
"""How long an attempt waits for an earlier one of its job to end here."""
SHORT_WAIT_S = 0.1
ABANDONED_S = 3600.0
"""Time since its last write after which an unfinished download belongs to no process: a transfer that stands still is broken off sooner."""


class NodeFull(FtError):
    """The node's disk has no space for an input or a checkpoint."""

    default_code = "disk_full"


@contextmanager
def noticing_a_full_disk() -> Iterator[None]:
    """Raise :class:`NodeFull` for writes that fail for lack of space: asking the store again would not help."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise NodeFull(f"the disk of the node is full ({error.strerror}: {error.filename})") from error


@contextmanager
def locked(job_dir: Path, *, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """Hold a job's directory: attempts of one job on this node take turns. The kernel releases it when the agent dies."""
    job_dir.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + wait_s
    with (job_dir / LOCK).open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise Unavailable(f"another attempt still runs in {job_dir}", code="node_busy") from None
                time.sleep(0.05)
        yield


def free(node_dir: Path, job: str, *, trains: bool = False) -> int:
    """Delete what is not needed now; returns the bytes.

    Of `job`, all checkpoints but the two newest and the best one that an early stop returns to, unless it `trains`: then its process and
    the uploads are at work on them. Of jobs that no agent holds, all but the newest, which the job needs until its finished model is
    stored; their links to inputs; and then inputs to which no job links, except downloads in progress.
    """
    freed = 0
    for job_dir in sorted((node_dir / "jobs").iterdir()):
        directory = job_dir / "checkpoints"
        if job_dir.name == job and trains:
            continue
        if job_dir.name == job:
            freed += _discard([*_dispensable(directory), *directory.glob(".tmp-*"), job_dir / "uploads"])
            continue
        with contextlib.suppress(Unavailable), locked(job_dir, wait_s=SHORT_WAIT_S):
            freed += _discard([*committed_checkpoints(directory)[:-1], *directory.glob(".tmp-*"), *job_dir.glob("inputs-a*")])
    for path, found in _files((node_dir / "inputs").glob("*/*")):
        if found.st_nlink == 1 and not (path.name.startswith(".") and time.time() - found.st_mtime < ABANDONED_S):
            path.unlink(missing_ok=True)
            freed += found.st_size
    return freed


def _discard(directories: Iterable[Path]) -> int:
    freed = 0
    for path in directories:
        freed += sum(found.st_size for _, found in _files(path.rglob("*")) if found.st_nlink == 1)
        discard_draft(path)
    return freed


def _files(paths: Iterable[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    """Yields the files among `paths` with their status; those that another agent deletes meanwhile are left out."""
    for path in paths:
        try:
            found = path.stat()
        except FileNotFoundError:
            continue
        if stat.S_ISREG(found.st_mode):
            yield path, found


def _dispensable(checkpoints_dir: Path) -> list[Path]:
    """Committed checkpoints except the two newest and the best."""
    found = committed_checkpoints(checkpoints_dir)
    best: str | None = None
    for path in reversed(found):
        try:
            reported = read_manifest(path).metrics.get("best_step")
        except IntegrityError:
            continue
        best = None if reported is None else step_name(int(reported))
        break
    return [path for path in found[:-2] if path.name != best]
