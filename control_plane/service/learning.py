"""What finished jobs, of all tenants, teach about how long the next one takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane import pools
from control_plane.estimates import Correction, Finished, Kind, correction
from control_plane.jobs import JobState
from control_plane.pools import JobClass, job_class
from control_plane.service import gpu_pools
from control_plane.service.platform import Platform
from control_plane.tables import attempts, jobs, reservations
from ft_assets.base_models import BaseModel
from ft_assets.training.spec import TrainingSpec

NEWEST = 100
"""Finished jobs that are looked at, of the model and of all: ten half-lives, older ones weigh less than a thousandth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """A training's time by the cost model, and what it is expected to be."""

    modelled_s: float
    correction: Correction

    @property
    def expected_s(self) -> float:
        """Seconds that the training holds its GPUs."""
        return self.correction.of(self.modelled_s)

    def in_words(self) -> str:
        """What it rests on, and how sure it is."""
        seen = self.correction
        low, high = (self.modelled_s * ratio for ratio in (seen.low, seen.high))
        band = f"eight of ten jobs are expected within {low:.0f} to {high:.0f} s of training"
        if not seen.num_jobs:
            return f"history: no finished job on these GPUs yet, the time is the cost model's alone; {band}"
        many = "1 finished job" if seen.num_jobs == 1 else f"{seen.num_jobs} finished jobs"
        alike = f"{seen.num_alike} of them with this model, method and adapter"
        return f"history: the cost model's time is multiplied by {seen.ratio:.2f}, learned from {many} on these GPUs, {alike}; {band}"


def expect(platform: Platform, model: BaseModel, spec: TrainingSpec, *, modelled_s: float) -> Expectation:
    """The cost model's time for `spec`, corrected by history."""
    kind_of_job = job_class(spec.adapter, model.num_parameters)
    return Expectation(modelled_s=modelled_s, correction=learned(platform, model.id, f"{spec.method}/{spec.adapter}", kind_of_job))


def learned(platform: Platform, model: str, way: str, kind_of_job: JobClass) -> Correction:
    """The correction for jobs that train `model` in this `way` on the first pool that takes their class.

    Every tenant's jobs are looked at, whoever asks: a ratio of times says nothing of anybody's data.
    """
    whole = platform.whole
    available = gpu_pools.planned(whole)
    of_its_class = pools.taking(available, kind_of_job) or available
    kind = Kind(gpu_type=of_its_class[0].gpu_type, model=model, way=way)
    types = {pool.name: pool.gpu_type for pool in available}
    with whole.engine.connect() as conn:
        same_model = _newest(conn, jobs.c.model == model)
        others = _newest(conn)
    rows = {row.id: row for row in (*same_model, *others)}
    newest_first = sorted(rows.values(), key=lambda row: (row.finished_at, row.id), reverse=True)
    return correction(kind, [_finished(row, types) for row in newest_first])


def _newest(conn: Connection, *only: sa.ColumnElement[bool]) -> list[sa.Row[Any]]:
    """The newest jobs that were trained to their end, each with what its attempts took.

    Attempts after the first begin anew: their set-up, as long as the first one's, and what they do again is not the training's time.
    """
    chosen = (
        sa.select(
            jobs.c.id, jobs.c.model, jobs.c.method, jobs.c.spec["adapter"].astext.label("adapter"), jobs.c.num_gpus, jobs.c.modelled_s,
            jobs.c.first_step_at, jobs.c.finished_at,
        )
        .where(jobs.c.state == JobState.SUCCEEDED, jobs.c.modelled_s > 0, jobs.c.reused_job_id.is_(None), *only)
        .order_by(jobs.c.finished_at.desc(), jobs.c.id.desc())
        .limit(NEWEST)
        .subquery()
    )  # fmt: skip
    pool = (
        sa.select(reservations.c.pool)
        .where(reservations.c.job_id == chosen.c.id)
        .order_by(reservations.c.attempt.desc())
        .limit(1)
        .scalar_subquery()
    )
    wall_s = sa.func.sum(_seconds(attempts.c.ended_at - attempts.c.started_at))
    setup_s = _seconds(chosen.c.first_step_at - sa.func.min(attempts.c.started_at))
    query = (
        sa.select(
            chosen.c.id, chosen.c.model, chosen.c.method, chosen.c.adapter, chosen.c.modelled_s,
            chosen.c.finished_at, pool.label("pool"), wall_s.label("wall_s"), sa.func.coalesce(setup_s, 0.0).label("setup_s"),
            (sa.func.coalesce(sa.func.sum(attempts.c.lost_s), 0.0) / chosen.c.num_gpus).label("lost_s"),
            sa.func.count(attempts.c.attempt).label("num_attempts"),
        )
        .join(attempts, attempts.c.job_id == chosen.c.id)
        .where(attempts.c.started_at.is_not(None), attempts.c.ended_at.is_not(None))
        .group_by(*chosen.c)
    )  # fmt: skip
    return list(conn.execute(query).all())


def _seconds(interval: sa.ColumnElement[Any]) -> sa.ColumnElement[float]:
    return sa.cast(sa.func.extract("epoch", interval), sa.Float)


def _finished(row: sa.Row[Any], gpu_types: dict[str, str]) -> Finished:
    again_s = float(row.lost_s) + (row.num_attempts - 1) * max(0.0, float(row.setup_s))
    return Finished(
        kind=Kind(gpu_type=gpu_types.get(row.pool, str(row.pool)), model=row.model, way=f"{row.method}/{row.adapter}"),
        modelled_s=row.modelled_s,
        took_s=max(0.0, float(row.wall_s) - again_s),
    )
