"""Disk space of a node: what its jobs' directories hold that can be fetched again."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ft_assets.errors import IntegrityError, Unavailable
from ft_assets.training.checkpoints import committed, discard, read_manifest, step_name
from ft_assets.training.disk_space import directory_bytes

LOCK = ".lock"


@contextmanager
def locked(job_dir: Path) -> Iterator[None]:
    """Hold a job's directory: attempts of one job on this node take turns. The kernel releases it when the agent dies."""
    job_dir.mkdir(parents=True, exist_ok=True)
    with (job_dir / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unavailable(f"another attempt still runs in {job_dir}", code="node_busy") from None
        yield


def free(jobs_dir: Path, job: str) -> int:
    """Delete checkpoints that are not needed; returns the bytes.

    Of `job`, all but the two newest and the best one that an early stop returns to. Of jobs that no agent holds, all but the newest, and
    that too if the job has finished its training.
    """
    freed = 0
    for job_dir in sorted(jobs_dir.iterdir()) if jobs_dir.is_dir() else ():
        directory = job_dir / "checkpoints"
        if job_dir.name == job:
            doomed = [*_dispensable(directory), *directory.glob(".tmp-*"), job_dir / "uploads"]
        elif _held(job_dir):
            continue
        else:
            doomed = [directory] if (job_dir / "final").is_dir() else [*committed(directory)[:-1], *directory.glob(".tmp-*")]
        for path in doomed:
            freed += directory_bytes(path)
            discard(path)
    return freed


def _held(job_dir: Path) -> bool:
    try:
        with locked(job_dir):
            return False
    except Unavailable:
        return True


def _dispensable(checkpoints_dir: Path) -> list[Path]:
    """Committed checkpoints except the two newest and the best."""
    found = committed(checkpoints_dir)
    best: str | None = None
    for path in reversed(found):
        try:
            reported = read_manifest(path).metrics.get("best_step")
        except IntegrityError:
            continue
        best = None if reported is None else step_name(int(reported))
        break
    return [path for path in found[:-2] if path.name != best]
