"""Directories of jobs on this machine: logs, the last checkpoints and a copy of the finished model, all of which the object store has."""

from __future__ import annotations

import shutil
from contextlib import suppress
from datetime import timedelta

import sqlalchemy as sa

from agent.node_space import locked
from control_plane.evaluations.tables import evaluations
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.platform.job_states import FINAL
from control_plane.queue.tables import reservations
from core.errors import Unavailable

KEPT_AFTER_END = timedelta(hours=1)


def remove_ended(platform: Platform) -> int:
    """Remove the directories of jobs that ended :data:`KEPT_AFTER_END` ago, and those of their attempts, on all nodes of this machine;
    returns how many jobs.

    One whose job is evaluated or exported stays, and one that an agent holds: the finished model is read there.
    """
    work, removed = platform.settings.work_dir, 0
    for directory in sorted([*work.glob("jobs/*"), *work.glob("nodes/*/jobs/*")]):
        if _is_due(platform, directory.name):
            with suppress(Unavailable), locked(directory, wait_s=0.0):
                shutil.rmtree(directory, ignore_errors=True)
                for workload in directory.parents[1].glob(f"launcher/{directory.name}-a*"):
                    shutil.rmtree(workload, ignore_errors=True)
                removed += 1
    return removed


def _is_due(platform: Platform, job_id: str) -> bool:
    held = sa.exists().where(reservations.c.job_id == jobs.c.id, reservations.c.released_at.is_(None))
    evaluated = sa.exists().where(evaluations.c.job_id == jobs.c.id, evaluations.c.state.in_(["queued", "running"]))
    ended = jobs.c.state.in_([state.value for state in FINAL]) & (jobs.c.finished_at < platform.clock() - KEPT_AFTER_END)
    with platform.engine.connect() as conn:
        return conn.scalar(sa.select(jobs.c.id).where(jobs.c.id == job_id, ended, ~held, ~evaluated)) is not None
