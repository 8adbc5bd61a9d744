"""How long trainings take: the cost model's time, corrected by what jobs like it took; and what is left of one that runs.

1. A finished job's ratio is the time that it took over the time that the cost model gave it, kept within :data:`BOUNDS`.
2. Ratios are looked at in four groups, each within the one before: jobs on the same GPUs; of these, those of the same base model; of these,
   those with the same method and adapter; of these, those on as many GPUs.
3. In a group the weighted median of the ratios counts, on a log scale: a job that took ten times as long (a bad disk, a stalled store)
   moves it no further than one that took a little longer. The newest job weighs most; :data:`HALF_LIFE` jobs later it weighs half.
4. Few jobs say little: the median is drawn towards the ratio of the group before, which weighs as much as :data:`PRIOR_JOBS`; before the
   first group stands the cost model itself, with a ratio of 1.
5. The band holds eight of ten jobs if they spread as the innermost group's did, drawn likewise towards :data:`PRIOR_SPREAD`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

BOUNDS = (1 / 30, 30.0)
"""Of a ratio: a GPU that is kept waiting for its data reaches a thirtieth of what the cost model gives it (2 % of an H100's peak). What
lies beyond is a broken record."""
HALF_LIFE = 10
"""Jobs: after a change of kernels or drivers, ten jobs later the new pace has as much weight as all that was before."""
PRIOR_JOBS = 1.0
"""One job says as much as the group around it: models differ in pace by more (a factor of two) than runs of one model do (10 to 30 %)."""
PRIOR_SPREAD = math.log(2.0)
"""Of the log ratio, where nothing was seen: half or twice as long."""
Z80 = 1.2816
"""Eight of ten lie within that many standard deviations of the mean."""
MAD_TO_SIGMA = 1.4826
"""A normal distribution's standard deviation over its median absolute deviation."""
PACE_STEPS = 5
"""Steps as which the estimate counts beside the pace that is seen: the first ones compile, fill caches and say little."""
OVERDUE_SHARE = 0.1
"""Of the time it ran: what a job without a step is given beyond its estimate, so that its end lies ahead and is not promised at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What decides a training's pace beside its size."""

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
    """Of all its attempts, without what was done twice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """What to multiply a modelled time with."""

    ratio: float = 1.0
    low: float = math.exp(-Z80 * PRIOR_SPREAD)
    """Ratio that one of ten jobs stays below."""
    high: float = math.exp(Z80 * PRIOR_SPREAD)
    """Ratio that one of ten jobs exceeds."""
    num_jobs: int = 0
    """On the same GPUs."""
    num_alike: int = 0
    """Of the same kind."""

    def of(self, modelled_s: float) -> float:
        """Seconds to be expected."""
        return modelled_s * self.ratio


def correction(kind: Kind, finished: Sequence[Finished]) -> Correction:
    """What `finished` jobs, newest first, say of one of this kind (rules 1 to 5)."""
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
    """Median and spread of a group, newest first, drawn towards those of the group before."""
    if not values:
        return centre, spread
    weights = [0.5 ** (place / HALF_LIFE) for place in range(len(values))]
    total = sum(weights)
    median = weighted_median(values, weights)
    inside = MAD_TO_SIGMA * weighted_median([abs(v - median) for v in values], weights)
    drawn = (total * median + PRIOR_JOBS * centre) / (total + PRIOR_JOBS)
    return drawn, math.sqrt((total * inside**2 + PRIOR_JOBS * spread**2) / (total + PRIOR_JOBS))


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The value at which half of the weight is reached; the mean of two where it is reached between them."""
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
    """Seconds until an attempt ends that has run for `ran_s`, and at `from_step` took over what others had done.

    1. Before its first step: what is expected of the steps that are left and of the set-up, less what it ran; where it ran longer than
       that, a share of the time it ran.
    2. Then by its pace: seconds a step since the set-up, drawn towards the expected ones, which count as :data:`PACE_STEPS` steps.

    `expected_s` is of the whole job, `setup_s` of every attempt's beginning; 0 `total_steps`: not known.
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
