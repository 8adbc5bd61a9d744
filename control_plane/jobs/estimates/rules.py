"""Expected training time: the cost model's time corrected by similar jobs; and the time left of a running one.

1. A finished job's ratio is its actual time divided by its modeled time, clipped to :data:`BOUNDS`.
2. Ratios are grouped four times, each group within the previous one: jobs on the same GPUs; of these, the same base model; of these, the
   same method and adapter; of these, the same number of GPUs.
3. A group's value is the weighted median of its ratios on a log scale: a job that took ten times as long (a bad disk, a stalled store)
   moves it no further than one that took a little longer. The newest job weighs most; one :data:`HALF_LIFE` jobs earlier weighs half.
4. With few jobs, the median is shrunk towards the ratio of the enclosing group, which weighs as much as :data:`PRIOR_JOBS`; around the
   first group stands the cost model itself, with a ratio of 1.
5. The band holds eight of ten jobs if they spread like the innermost group, shrunk likewise towards :data:`PRIOR_SPREAD`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

BOUNDS = (1 / 30, 30.0)
"""Bounds of a ratio: a GPU that waits for its data reaches a thirtieth of the modeled speed (2 % of an H100's peak). Anything beyond is
a broken record."""
HALF_LIFE = 10
"""In jobs: after a change of kernels or drivers, ten jobs later the new pace weighs as much as everything before."""
PRIOR_JOBS = 1.0
"""One job weighs as much as the enclosing group: models differ in pace by more (a factor of two) than runs of one model do (10 to 30 %)."""
PRIOR_SPREAD = math.log(2.0)
"""Prior spread of the log ratio: half or twice as long."""
Z80 = 1.2816
"""Eight of ten values lie within this many standard deviations of the mean."""
MAD_TO_SIGMA = 1.4826
"""Standard deviation of a normal distribution divided by its median absolute deviation."""
PACE_STEPS = 5
"""Weight of the estimate in steps, next to the observed pace: the first steps compile and fill caches and say little."""
OVERDUE_SHARE = 0.1
"""Extra time for a job without a step beyond its estimate, as a share of its run time, so that its expected end stays ahead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What determines a training's pace apart from its size."""

    gpu_type: str
    model: str
    way: str
    """Method and adapter: ``sft/lora``."""
    num_gpus: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A job that was trained to its end."""

    kind: Kind
    modelled_s: float
    took_s: float
    """Seconds over all attempts, without repeated work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Correction of a modeled time."""

    ratio: float = 1.0
    low: float = math.exp(-Z80 * PRIOR_SPREAD)
    """One in ten jobs has a lower ratio."""
    high: float = math.exp(Z80 * PRIOR_SPREAD)
    """One in ten jobs has a higher ratio."""
    num_jobs: int = 0
    """Jobs on the same GPUs."""
    num_alike: int = 0
    """Jobs of the same kind."""

    def of(self, modelled_s: float) -> float:
        """Return the expected seconds."""
        return modelled_s * self.ratio


def correction(kind: Kind, finished: Sequence[Finished]) -> Correction:
    """Compute the correction for one kind from `finished` jobs, newest first (rules 1 to 5)."""
    measured = [job for job in finished if job.modelled_s > 0 and job.took_s > 0 and job.kind.gpu_type == kind.gpu_type]
    ratios = [(job.kind, _log_ratio(job)) for job in measured]
    same_model = [(k, v) for k, v in ratios if k.model == kind.model]
    same_way = [(k, v) for k, v in same_model if k.way == kind.way]
    alike = [(k, v) for k, v in same_way if k.num_gpus == kind.num_gpus]
    centre, spread = 0.0, PRIOR_SPREAD
    for group in (ratios, same_model, same_way, alike):
        centre, spread = _drawn([v for _, v in group], centre, spread)
    return Correction(
        ratio=math.exp(centre),
        low=math.exp(centre - Z80 * spread),
        high=math.exp(centre + Z80 * spread),
        num_jobs=len(ratios),
        num_alike=len(alike),
    )


def _log_ratio(job: Finished) -> float:
    low, high = BOUNDS
    return math.log(min(high, max(low, job.took_s / job.modelled_s)))


def _drawn(values: Sequence[float], centre: float, spread: float) -> tuple[float, float]:
    """Return median and spread of a group, newest first, shrunk towards those of the enclosing group."""
    if not values:
        return centre, spread
    weights = [0.5 ** (place / HALF_LIFE) for place in range(len(values))]
    total = sum(weights)
    median = weighted_median(values, weights)
    inside = MAD_TO_SIGMA * weighted_median([abs(v - median) for v in values], weights)
    drawn = (total * median + PRIOR_JOBS * centre) / (total + PRIOR_JOBS)
    return drawn, math.sqrt((total * inside**2 + PRIOR_JOBS * spread**2) / (total + PRIOR_JOBS))


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted median; the mean of two values if half of the weight is reached exactly between them."""
    ordered = sorted(zip(values, weights, strict=True))
    half, reached = sum(weights) / 2, 0.0
    for place, (value, weight) in enumerate(ordered):
        reached += weight
        if math.isclose(reached, half) and place + 1 < len(ordered):
            return (value + ordered[place + 1][0]) / 2
        if reached > half:
            return value
    return ordered[-1][0]


def remaining_s(*, expected_s: float, ran_s: float, setup_s: float, step: int = 0, from_step: int = 0, total_steps: int = 0) -> float:
    """Return the seconds until the end of an attempt that has run for `ran_s` and continued from `from_step`.

    1. Before its first step: the expected time of the remaining steps and of the set-up, less what it ran; if it ran longer, a share of its
       run time.
    2. After that: by its pace in seconds per step since the set-up, shrunk towards the expected pace, which counts as :data:`PACE_STEPS`
       steps.

    `expected_s` covers the whole job, `setup_s` the start of every attempt; `total_steps` 0 means unknown.
    """
    training_s = max(0.0, expected_s - setup_s)
    if total_steps <= 0:
        return max(expected_s - ran_s, OVERDUE_SHARE * ran_s)
    planned = training_s / total_steps
    done = step - from_step
    if done <= 0:
        return max(setup_s + planned * (total_steps - from_step) - ran_s, OVERDUE_SHARE * ran_s)
    stepping_s = max(ran_s - setup_s, ran_s * done / (done + PACE_STEPS))
    pace = (stepping_s + PACE_STEPS * planned) / (done + PACE_STEPS)
    return max(0.0, pace * (total_steps - step))
