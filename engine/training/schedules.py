"""Schedules of the learning rate: their names and options, and the factor of the rate at each step.

Every named schedule starts with a linear warm-up from 0 to 1. A list of points has its own: ``[[0, 0], [0.1, 1], [1, 0]]`` rises over the
first tenth of the run and then falls to 0, in straight lines. Positions are shares of the run if all are at most 1, else whole steps.

Names and formulas are those of transformers (``get_scheduler``), so that a run moved here follows the same curve. Nothing here imports
torch.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from engine.training.spec import Optimization

ScheduleName = Literal["linear", "cosine", "constant", "wsd", "cosine_with_restarts", "polynomial", "inverse_sqrt"]
Points = tuple[tuple[float, float], ...]
"""Pairs of a position in the run and the factor of the rate there."""
DecayShape = Literal["linear", "cosine", "1-sqrt"]

NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)
DECAY_SHAPES: tuple[DecayShape, ...] = get_args(DecayShape)
ALIASES: Mapping[str, ScheduleName] = {
    "warmup_stable_decay": "wsd",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "cosine_with_hard_restarts": "cosine_with_restarts",
    "inverse_square_root": "inverse_sqrt",
}
"""Names that transformers, Axolotl and LLaMA-Factory have for the same curve."""
FALLING: tuple[ScheduleName, ...] = ("linear", "cosine", "wsd", "cosine_with_restarts", "polynomial", "inverse_sqrt")
OPTIONS: Mapping[str, tuple[ScheduleName, ...]] = {
    "warmup_ratio": NAMES,
    "min_lr_ratio": FALLING,
    "schedule_decay_ratio": ("wsd",),
    "schedule_decay_shape": ("wsd",),
    "schedule_cycles": ("cosine_with_restarts",),
    "schedule_power": ("polynomial",),
    "schedule_timescale": ("inverse_sqrt",),
}
"""Hyperparameters that only some schedules read, with those schedules; none is read with a list of points."""
MAX_POINTS = 100
OR_POINTS = ", or a list of points such as [[0, 0], [0.1, 1], [1, 0]]: rising shares of the run (or whole steps) with factors from 0 to 1"
TIMESCALE = 10_000
"""Steps of `inverse_sqrt` without a warm-up and without `schedule_timescale`, as in transformers."""


def is_points(value: object) -> bool:
    """Whether `value` is a list of points: rising positions, factors of the rate from 0 to 1, and one of them above 0."""
    if not isinstance(value, list | tuple) or not 2 <= len(value) <= MAX_POINTS or not all(map(_is_pair, value)):
        return False
    positions, factors = zip(*value, strict=True)
    rising = positions[0] >= 0 and all(a < b for a, b in pairwise(positions))
    whole = positions[-1] <= 1 or all(p == int(p) for p in positions)
    return rising and whole and all(0 <= f <= 1 for f in factors) and max(factors) > 0


def _is_pair(value: object) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    return all(isinstance(n, int | float) and not isinstance(n, bool) and abs(n) < 1e15 for n in value)  # also refuses nan


def name_of(schedule: object) -> str:
    """Return the schedule's name, or `points` for a list of them."""
    return str(schedule) if isinstance(schedule, str) else "points"


def warmup_steps(opt: Optimization, *, total_steps: int) -> int:
    """Return the steps of the warm-up; 0 for a list of points."""
    return 0 if isinstance(opt.schedule, tuple) else math.ceil(total_steps * opt.warmup_ratio)


def factor(opt: Optimization, step: int, *, total_steps: int) -> float:
    """Return the factor of the learning rate for the update after `step` earlier ones. Pure, so a resumed run needs only the step.

    1. A list of points: between two points, a straight line; before the first and after the last, their factors.
    2. In the warm-up: from 0, linearly.
    3. Then the schedule's fall from 1, scaled to end at ``min_lr_ratio``.
    """
    if isinstance(opt.schedule, tuple):
        return _between(opt.schedule, step, total_steps)
    warmup = warmup_steps(opt, total_steps=total_steps)
    if step < warmup:
        return step / max(1, warmup)
    fall = _fall(opt, step, warmup=warmup, total=total_steps)
    return opt.min_lr_ratio + (1.0 - opt.min_lr_ratio) * fall if opt.min_lr_ratio else fall


def _between(points: Points, step: int, total_steps: int) -> float:
    at = step / max(1, total_steps) if points[-1][0] <= 1 else float(step)
    after = bisect.bisect_right(points, at, key=lambda point: point[0])
    if after in (0, len(points)):
        return points[min(after, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[after - 1], points[after]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def _fall(opt: Optimization, step: int, *, warmup: int, total: int) -> float:
    """Return the factor after the warm-up, before ``min_lr_ratio``."""
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    match opt.schedule:
        case "linear":
            return max(0.0, (total - step) / max(1, total - warmup))
        case "cosine":
            return _half_cosine(done)
        case "wsd":
            length = decay_steps(opt, total_steps=total)
            return _decay(opt.schedule_decay_shape or "linear", max(0.0, min(1.0, (step - total + length) / max(1, length))))
        case "cosine_with_restarts":
            return 0.0 if done >= 1.0 else _half_cosine((opt.schedule_cycles or 1) * done % 1.0)
        case "polynomial":
            return float((1.0 - done) ** (opt.schedule_power or 1.0))
        case "inverse_sqrt":
            timescale = opt.schedule_timescale or warmup or TIMESCALE
            return 1.0 / math.sqrt((step + timescale - warmup) / timescale)
        case _:
            return 1.0


def decay_steps(opt: Optimization, *, total_steps: int) -> int:
    """Return the steps over which `wsd` falls: its share of the run, at most what the warm-up leaves."""
    return min(math.ceil(total_steps * (opt.schedule_decay_ratio or 0.0)), total_steps - warmup_steps(opt, total_steps=total_steps))


def _decay(shape: DecayShape, done: float) -> float:
    if shape == "cosine":
        return _half_cosine(done)
    return 1.0 - (done if shape == "linear" else math.sqrt(done))


def _half_cosine(done: float) -> float:
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * done)))


def describe_schedule(opt: Optimization, *, total_steps: int) -> str:
    """Return the schedule of a run in words, such as ``0.0002, 3 steps of warm-up, then cosine to 0``."""
    rate = f"{opt.learning_rate:g}"
    if isinstance(opt.schedule, tuple):
        unit = "of the run" if opt.schedule[-1][0] <= 1 else "steps"
        return f"{rate}, times {', '.join(f'{f:g} at {p:g}' for p, f in opt.schedule)} ({unit})"
    warmup = warmup_steps(opt, total_steps=total_steps)
    started = f"{rate}, {warmup} steps of warm-up, then " if warmup else f"{rate}, "
    return started + _course(opt, total_steps)


def _course(opt: Optimization, total_steps: int) -> str:
    end = f"{opt.learning_rate * opt.min_lr_ratio:g}"
    match opt.schedule:
        case "constant":
            return "constant"
        case "wsd":
            return f"constant, and {opt.schedule_decay_shape} to {end} in the last {decay_steps(opt, total_steps=total_steps)} steps"
        case "cosine_with_restarts":
            return f"{opt.schedule_cycles} cosines to {end}"
        case "polynomial":
            return f"polynomial of power {opt.schedule_power:g} to {end}"
        case "inverse_sqrt":
            return f"inverse square root towards {end}"
        case name:
            return f"{name} to {end}"
