"""Directories of jobs on this machine: logs, the last checkpoints and a copy of the finished model, all of which the object store has."""

from __future__ import annotations

import shutil
from datetime import timedelta

import sqlalchemy as sa

from control_plane.evaluations.tables import evaluations
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.platform.job_states import FINAL
from control_plane.queue.tables import reservations

KEPT_AFTER_END = timedelta(hours=1)


def remove_ended(platform: Platform) -> int:
    """Remove the directories of jobs that ended :data:`KEPT_AFTER_END` ago; returns how many.

    One whose job is evaluated or exported stays: its model is read there.
    """
    root = platform.settings.work_dir / "jobs"
    names = [path.name for path in root.iterdir()] if root.is_dir() else []
    held = sa.exists().where(reservations.c.job_id == jobs.c.id, reservations.c.released_at.is_(None))
    evaluated = sa.exists().where(evaluations.c.job_id == jobs.c.id, evaluations.c.state.in_(["queued", "running"]))
    ended = jobs.c.state.in_([state.value for state in FINAL]) & (jobs.c.finished_at < platform.clock() - KEPT_AFTER_END)
    with platform.engine.connect() as conn:
        due = conn.execute(sa.select(jobs.c.id).where(jobs.c.id.in_(names), ended, ~held, ~evaluated)).scalars().all()
    for job_id in due:
        shutil.rmtree(root / job_id, ignore_errors=True)
    return len(due)
