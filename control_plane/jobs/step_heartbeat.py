"""Heartbeats of the steps that work on a job."""

from __future__ import annotations

import sqlalchemy as sa

from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform

RunNumbers = tuple[int, ...]
"""The attempt of a job and the number of runs of each stage; a step that began with other numbers has been replaced."""
RUN_NUMBERS = (jobs.c.attempt, jobs.c.prepare_runs, jobs.c.train_runs, jobs.c.evaluate_runs)


def run_numbers(platform: Platform, job_id: str) -> RunNumbers:
    """The numbers that a step beginning now sends its heartbeats with; empty if there is no such job."""
    with platform.engine.connect() as conn:
        return tuple(conn.execute(sa.select(*RUN_NUMBERS).where(jobs.c.id == job_id)).first() or ())


def beat(platform: Platform, job_id: str, numbers: RunNumbers) -> None:
    """Record that a step works on the job; a job without a heartbeat for a while gets another run.

    Heartbeats of a step that was replaced are ignored: they would hide the death of its successor.
    """
    still = [column == number for column, number in zip(RUN_NUMBERS, numbers, strict=False)]
    with platform.engine.begin() as conn:
        conn.execute(sa.update(jobs).where(jobs.c.id == job_id, *still).values(heartbeat_at=platform.clock()))
