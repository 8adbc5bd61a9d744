"""Which checkpoints are kept, in the object store and on this machine. A row that is retired is read by nobody; then its objects go."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.jobs import FINAL
from control_plane.service.attempts import Claim, holds_in
from control_plane.service.platform import Platform
from control_plane.service.transfer import FAILURES
from control_plane.tables import checkpoints, jobs, reservations
from ft_assets import layout
from ft_assets.training.checkpoints import committed, discard
from ft_assets.training.disk_space import directory_bytes

log = logging.getLogger(__name__)

MIN_KEPT = 3
"""Of a running job, whatever its policy: the newest may be torn, and the one before it damaged."""
KEPT_AFTER_END = timedelta(days=7)
"""How long the last checkpoints of an ended job can be started from; its finished model is kept with its adapter."""
MAX_JOBS = 50
"""Ended jobs that one call looks at."""


def retire_checkpoints(platform: Platform, held: Claim) -> list[int]:
    """Give up all but the newest checkpoints of a running job; returns the steps that are gone now.

    Fenced: an attempt that was released retires nothing. Finished models stay, and so does a checkpoint from which another
    job is to start. Called after each commit; what a store that is away leaves behind goes with the next call.
    """
    early = held.spec.optimization.early_stopping
    keep = max(MIN_KEPT, held.spec.checkpoint.keep_last, early.patience + 1 if early else 0)  # the best one is among them
    with platform.engine.begin() as conn:
        if not holds_in(conn, held):
            return []
        steps = _kept_steps(conn, held.job_id)[keep:]
        _retire(conn, platform, held.job_id, steps)
    return remove_retired(platform, held.job_id)


def retire_ended(platform: Platform) -> int:
    """Give up the checkpoints of jobs that ended :data:`KEPT_AFTER_END` ago, and whatever else they left; returns how many jobs."""
    limit = platform.clock() - KEPT_AFTER_END
    kept = checkpoints.c.removed_at.is_(None) & ~checkpoints.c.final
    held = sa.select(reservations.c.job_id).where(reservations.c.released_at.is_(None))
    query = (
        sa.select(jobs.c.id, jobs.c.tenant_id)
        .where(jobs.c.state.in_(FINAL), jobs.c.finished_at < limit, jobs.c.id.not_in(held))
        .where(jobs.c.id.in_(sa.select(checkpoints.c.job_id).where(kept)))
        .order_by(jobs.c.finished_at)
        .limit(MAX_JOBS)
    )
    with platform.engine.connect() as conn:
        ended = conn.execute(query).all()
    for job in ended:
        with platform.engine.begin() as conn:
            _retire(conn, platform, job.id, _kept_steps(conn, job.id))
        remove_retired(platform, job.id)
        _sweep(platform, job.tenant_id, job.id)
    return len(ended)


def remove_retired(platform: Platform, job_id: str) -> list[int]:
    """Delete the objects of retired checkpoints; one whose objects are not gone yet is tried again by the next call."""
    due = checkpoints.c.retired_at.is_not(None) & checkpoints.c.removed_at.is_(None)
    with platform.engine.connect() as conn:
        rows = conn.execute(sa.select(checkpoints).where(checkpoints.c.job_id == job_id, due)).all()
    removed = []
    for row in rows:
        try:
            _delete_all(platform, row.object_prefix)
        except FAILURES as e:
            log.warning("objects of retired checkpoint %s are still there: %s", row.id, e)
            continue
        this = (checkpoints.c.id == row.id) & (checkpoints.c.object_prefix == row.object_prefix) & due
        with platform.engine.begin() as conn:
            conn.execute(sa.update(checkpoints).where(this).values(removed_at=platform.clock()))
        removed.append(int(row.step))
    return removed


def free_machine(platform: Platform, job_id: str) -> int:
    """Free bytes on this machine's disk: checkpoints of ended jobs, and all but the two newest of `job_id`; returns how many."""
    root = platform.settings.work_dir / "jobs"
    freed = 0
    with platform.engine.connect() as conn:
        ended = set(conn.execute(sa.select(jobs.c.id).where(jobs.c.state.in_(FINAL))).scalars())
    for work_dir in sorted(root.iterdir()) if root.is_dir() else ():
        directory = work_dir / "checkpoints"
        doomed = [directory] if work_dir.name in ended else []
        if work_dir.name == job_id:
            doomed = [*committed(directory)[:-2], *directory.glob(".tmp-*"), work_dir / "uploads"]
        for path in doomed:
            freed += directory_bytes(path)
            discard(path)
    return freed


def _kept_steps(conn: Connection, job_id: str) -> Sequence[int]:
    """Steps of checkpoints that could be retired, newest first."""
    start = jobs.c.warm_start["checkpoint_id"].astext
    wanted = sa.exists().where(start == checkpoints.c.id, jobs.c.state.not_in(FINAL))
    query = sa.select(checkpoints.c.step).where(
        checkpoints.c.job_id == job_id, ~checkpoints.c.final, checkpoints.c.retired_at.is_(None), ~wanted
    )
    return list(conn.execute(query.order_by(checkpoints.c.step.desc())).scalars())


def _retire(conn: Connection, platform: Platform, job_id: str, steps: Sequence[int]) -> None:
    if steps:
        this = (checkpoints.c.job_id == job_id) & checkpoints.c.step.in_(steps)
        conn.execute(sa.update(checkpoints).where(this).values(retired_at=platform.clock()))


def _sweep(platform: Platform, tenant: str, job_id: str) -> None:
    """Delete what uploads left that were never committed, or were committed anew by a later attempt."""
    with platform.engine.connect() as conn:
        query = sa.select(checkpoints.c.object_prefix).where(checkpoints.c.job_id == job_id, checkpoints.c.removed_at.is_(None))
        kept = tuple(f"{prefix}/" for prefix in conn.execute(query).scalars())
    try:
        for info in list(platform.objects.list(f"{layout.job_prefix(tenant, job_id)}/checkpoints")):
            if not info.key.startswith(kept):
                platform.objects.delete(info.key)
    except FAILURES as e:
        log.warning("leftovers of job %s are still there: %s", job_id, e)


def _delete_all(platform: Platform, prefix: str) -> None:
    """The manifest first: what is left by a crash is no checkpoint."""
    found = sorted(platform.objects.list(prefix), key=lambda i: not i.key.endswith("/manifest.json"))
    for info in found:
        platform.objects.delete(info.key)
