"""What finished jobs, of all tenants, teach about how long the next one takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.attempts.tables import attempts
from control_plane.capacity import active_pools, pools
from control_plane.capacity.pools import job_class
from control_plane.jobs.estimates import job_plan
from control_plane.jobs.estimates.rules import Correction, Finished, Kind, correction
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.queue.tables import reservations
from ft_assets.base_models import BaseModel
from ft_assets.training.cost_model import Cost, cost
from ft_assets.training.memory import Case
from ft_assets.training.spec import Quantization, TrainingSpec

NEWEST = 100
"""Finished jobs on GPUs of the type that are looked at, of the model and of all: ten half-lives, older ones weigh less than a
thousandth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """A training's time by the cost model, and what it is expected to be."""

    modelled: Cost
    correction: Correction
    trained_tokens: float
    """Of all epochs and ranks."""

    @property
    def expected_s(self) -> float:
        """Seconds that the training holds its GPUs."""
        return self.correction.of(self.modelled.total_s)

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks together, by the cost model."""
        return self.trained_tokens / self.modelled.steps_s

    def in_words(self) -> str:
        """What it rests on, and how sure it is."""
        seen = self.correction
        low, high = (self.modelled.total_s * ratio for ratio in (seen.low, seen.high))
        band = f"eight of ten jobs are expected within {low:.0f} to {high:.0f} s of training"
        if not seen.num_jobs:
            return f"history: no finished job on these GPUs yet, the time is the cost model's alone; {band}"
        many = "1 finished job" if seen.num_jobs == 1 else f"{seen.num_jobs} finished jobs"
        alike = f"{seen.num_alike} of them with this model, method, adapter and number of GPUs"
        return f"history: the cost model's time is multiplied by {seen.ratio:.2f}, learned from {many} on these GPUs, {alike}; {band}"


def expect(platform: Platform, model: BaseModel, spec: TrainingSpec, *, num_rows: int, tokens_per_epoch: int) -> Expectation:
    """How long `spec` holds its GPUs on a pack of `num_rows`: by the cost model, and corrected by history.

    Whole steps are trained: the last one is filled up with rows of the next epoch.
    """
    available = active_pools.planned(platform.whole)
    kind_of_job = job_class(spec.adapter, model.num_parameters)
    gpu_type = (pools.taking(available, kind_of_job) or available)[0].gpu_type
    case = Case(
        shape=job_plan.shape_of(model), adapter=spec.adapter, method=spec.method, precision=spec.precision, max_seq_len=spec.max_seq_len,
        per_device_batch_size=spec.optimization.per_device_batch_size, rank=spec.lora.rank if spec.lora else 0,
        quantization=spec.quantization or Quantization(), attention=spec.attention, gradient_checkpointing=spec.gradient_checkpointing,
        strategy=spec.strategy, world_size=spec.world_size,
    )  # fmt: skip
    steps = spec.optimization.total_steps(num_rows=num_rows, world_size=spec.world_size)
    rows = steps * spec.optimization.global_batch_size(spec.world_size)
    tokens = tokens_per_epoch * rows / num_rows
    kind = Kind(gpu_type=gpu_type, model=model.id, way=f"{spec.method}/{spec.adapter}", num_gpus=spec.world_size)
    modelled = cost(case, gpu_type, rows=rows, tokens=tokens, accumulation_steps=spec.optimization.accumulation_steps)
    return Expectation(modelled=modelled, correction=learned(platform, kind), trained_tokens=tokens)


def learned(platform: Platform, kind: Kind) -> Correction:
    """The correction for jobs of this `kind`.

    Jobs of all tenants count, whoever asks: a ratio of two durations says nothing about their data.
    """
    whole = platform.whole
    pools = [pool.name for pool in active_pools.planned(whole) if pool.gpu_type == kind.gpu_type]
    with whole.engine.connect() as conn:
        same_model = _newest(conn, pools, jobs.c.model == kind.model)
        others = _newest(conn, pools)
    rows = {row.id: row for row in (*same_model, *others)}
    newest_first = sorted(rows.values(), key=lambda row: (row.finished_at, row.id), reverse=True)
    return correction(kind, [_finished(row, kind.gpu_type) for row in newest_first])


def _newest(conn: Connection, pools: Sequence[str], *only: sa.ColumnElement[bool]) -> list[sa.Row[Any]]:
    """The newest jobs that were trained to their end in one of `pools`, each with what its attempts took. The last attempt's pool counts.

    Attempts after the first begin anew: their set-up, as long as the first one's, and what they do again is not the training's time.
    """
    pool = (
        sa.select(reservations.c.pool)
        .where(reservations.c.job_id == jobs.c.id)
        .order_by(reservations.c.attempt.desc())
        .limit(1)
        .scalar_subquery()
    )
    chosen = (
        sa.select(
            jobs.c.id, jobs.c.model, jobs.c.method, jobs.c.spec["adapter"].astext.label("adapter"), jobs.c.num_gpus, jobs.c.modelled_s,
            jobs.c.first_step_at, jobs.c.finished_at,
        )
        .where(jobs.c.state == JobState.SUCCEEDED, jobs.c.modelled_s > 0, jobs.c.reused_job_id.is_(None), pool.in_(pools), *only)
        .order_by(jobs.c.finished_at.desc(), jobs.c.id.desc())
        .limit(NEWEST)
        .subquery()
    )  # fmt: skip
    wall_s = sa.func.sum(_seconds(attempts.c.ended_at - attempts.c.started_at))
    setup_s = _seconds(chosen.c.first_step_at - sa.func.min(attempts.c.started_at))
    query = (
        sa.select(
            chosen.c.id, chosen.c.model, chosen.c.method, chosen.c.adapter, chosen.c.num_gpus, chosen.c.modelled_s,
            chosen.c.finished_at, wall_s.label("wall_s"), sa.func.coalesce(setup_s, 0.0).label("setup_s"),
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


def _finished(row: sa.Row[Any], gpu_type: str) -> Finished:
    again_s = float(row.lost_s) + (row.num_attempts - 1) * max(0.0, float(row.setup_s))
    return Finished(
        kind=Kind(gpu_type=gpu_type, model=row.model, way=f"{row.method}/{row.adapter}", num_gpus=row.num_gpus),
        modelled_s=row.modelled_s,
        took_s=max(0.0, float(row.wall_s) - again_s),
    )
