"""Sweeps: many jobs from one request. Pure: which trials to run, the sweep's status, the best trial.

``sweep`` in the body defines what varies::

    {"strategy": "grid" | "random", "parameters": {"learning_rate": [1e-4, 2e-4], "rank": [8, 16]}, "max_jobs": 20, "seed": 1,
     "metric": "eval_loss", "goal": "minimize"}

A random sweep may also draw from a range: ``{"min": 1e-5, "max": 1e-3, "scale": "log"}``.
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, NamedTuple, Self

from control_plane.platform.job_states import FINAL, JobState
from core.errors import InvalidRequest

MAX_TRIALS = 100
"""Jobs of one sweep: a premium tenant runs 20 at once, so this is five rounds."""
MAX_SEED = 2**31 - 1
DRAWS_PER_TRIAL = 100
"""Draws after which a random sweep takes what it has: whole numbers of a narrow range repeat."""
MAX_LISTED = 10_000
"""Combinations listed for drawing without replacement; with more of them, at most one draw in a hundred repeats."""
FIELDS = ("strategy", "parameters", "max_jobs", "seed", "metric", "goal")
LOSSES = ("eval_loss", "train_loss")
"""Metrics from the curves; every other metric is a score of the evaluation report, ``<suite>/<metric>``."""
LESS_IS_BETTER = (*LOSSES, "perplexity")

Scale = Literal["linear", "log"]
Goal = Literal["minimize", "maximize"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Range to draw from; whole numbers if both ends are whole."""

    low: float
    high: float
    scale: Scale = "linear"

    def draw(self, rng: random.Random) -> float:
        if isinstance(self.low, int) and isinstance(self.high, int):
            whole = round(math.exp(rng.uniform(math.log(self.low), math.log(self.high)))) if self.scale == "log" else None
            return rng.randint(self.low, self.high) if whole is None else whole
        drawn = math.exp(rng.uniform(math.log(self.low), math.log(self.high))) if self.scale == "log" else rng.uniform(self.low, self.high)
        return min(max(float(f"{drawn:.3g}"), self.low), self.high)  # three digits, as a person would write it


Values = tuple[Any, ...] | Range


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    strategy: Literal["grid", "random"]
    parameters: Mapping[str, Any]
    """Varying hyperparameters as requested: each a list of values or a range."""
    max_jobs: int
    seed: int
    """Seed of the draws, and of every trial's training if the request names no other."""
    metric: str = "eval_loss"
    goal: Goal = "minimize"

    @classmethod
    def from_body(cls, body: object, *, drawn_seed: int) -> Self:
        """Read ``sweep``; ``InvalidRequest`` (``invalid_sweep``) names what is wrong. `drawn_seed` is used if none is given."""
        if not isinstance(body, Mapping):
            raise refusal("sweep", f"sweep {str(body)[:80]!r} is not an object; see the fields {', '.join(FIELDS)}")
        given = {k: v for k, v in body.items() if v is not None}
        if unknown := sorted(set(given) - set(FIELDS)):
            raise refusal(unknown[0], f"unknown field {unknown[0][:80]!r}; known are {', '.join(FIELDS)}")
        strategy = _word(given, "strategy", ("grid", "random"), default="grid")
        metric = given.get("metric", "eval_loss")
        if not isinstance(metric, str) or not (metric in LOSSES or "/" in metric):
            raise refusal(
                "metric", f"metric {str(metric)[:80]!r} is not one of {', '.join(LOSSES)} or <suite>/<metric> of the evaluation report"
            )
        if "goal" not in given and metric.rsplit("/", 1)[-1] not in LESS_IS_BETTER:
            raise refusal("goal", f"say whether {metric} is to be minimized or maximized: goal minimize or maximize")
        if strategy == "random" and "max_jobs" not in given:
            raise refusal("max_jobs", f"a random sweep needs max_jobs: how many to draw, 1 to {MAX_TRIALS}")
        made = cls(
            strategy="grid" if strategy == "grid" else "random",
            parameters=_parameters(given.get("parameters"), strategy),
            max_jobs=_whole(given, "max_jobs", 1, MAX_TRIALS, default=MAX_TRIALS),
            seed=_whole(given, "seed", 0, MAX_SEED, default=drawn_seed),
            metric=metric,
            goal="minimize" if _word(given, "goal", ("minimize", "maximize"), default="minimize") == "minimize" else "maximize",
        )
        size = made.num_combinations()
        if made.strategy == "grid" and size is not None and size > made.max_jobs:
            raise refusal(
                "max_jobs",
                f"the grid has {size} combinations and max_jobs is {made.max_jobs} (at most {MAX_TRIALS}); leave values out, or use "
                "strategy random",
            )
        return made

    def num_combinations(self) -> int | None:
        """Number of combinations; None if a range makes them unlimited."""
        values = [_values(v) for v in self.parameters.values()]
        return None if any(isinstance(v, Range) for v in values) else math.prod(len(v) for v in values if isinstance(v, tuple))

    def trials(self) -> list[Mapping[str, Any]]:
        """Return the hyperparameters of each trial, all different; the same settings give the same trials in the same order.

        1. A grid: every combination, the last parameter varying fastest.
        2. Random over lists: up to ``max_jobs`` combinations, drawn without replacement.
        3. Random with a range, or over very many combinations: ``max_jobs`` draws; a repeated one is drawn again.
        """
        names = list(self.parameters)
        values = [_values(v) for v in self.parameters.values()]
        rng = random.Random(self.seed)
        size = self.num_combinations()
        if size is not None and (self.strategy == "grid" or size <= MAX_LISTED):
            every = list(product(*(v for v in values if isinstance(v, tuple))))
            chosen = every if self.strategy == "grid" else rng.sample(every, min(self.max_jobs, len(every)))
        else:
            chosen = list(_draws(values, rng, self.max_jobs))
        return [dict(zip(names, one, strict=True)) for one in chosen]


def _draws(values: Sequence[Values], rng: random.Random, num: int) -> Iterator[tuple[Any, ...]]:
    seen = set()
    for _ in range(num * DRAWS_PER_TRIAL):
        one = tuple(v.draw(rng) if isinstance(v, Range) else rng.choice(v) for v in values)
        key = repr([canonical(v) for v in one])
        if key not in seen:
            seen.add(key)
            yield one
        if len(seen) == num:
            return


def _parameters(given: object, strategy: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping) or not given:
        raise refusal("parameters", 'parameters is missing or empty; write {"learning_rate": [1e-4, 2e-4]}')
    for name, requested in given.items():
        read = _values(requested, name=str(name))
        if isinstance(read, Range) and strategy == "grid":
            raise refusal(f"parameters.{name}", f"{name} is a range, and a grid needs a list of values; list them, or use strategy random")
    return dict(given)


def _values(requested: object, *, name: str = "") -> Values:
    """Read a list of different values, or a range."""
    where = f"parameters.{name}"
    if isinstance(requested, Mapping):
        low, high, scale = requested.get("min"), requested.get("max"), requested.get("scale", "linear")
        if set(requested) - {"min", "max", "scale"} or not _number(low) or not _number(high) or scale not in ("linear", "log"):
            raise refusal(where, f'{name} is not a range; write {{"min": 1e-5, "max": 1e-3, "scale": "log"}} (or "linear"), or a list')
        assert isinstance(low, (int, float)) and isinstance(high, (int, float))
        if not low < high or (scale == "log" and low <= 0):
            positive = ", and above 0 for scale log" if scale == "log" else ""
            raise refusal(where, f"{name}: min {low:g} must be below max {high:g}{positive}")
        return Range(low=low, high=high, scale="log" if scale == "log" else "linear")
    if not isinstance(requested, (list, tuple)) or not 1 <= len(requested) <= MAX_TRIALS:
        raise refusal(where, f"{name} needs a list of 1 to {MAX_TRIALS} values, or a range with min and max")
    if len({repr(canonical(v)) for v in requested}) < len(requested):
        raise refusal(where, f"{name} lists a value twice (8 and 8.0 are one, and so are null and auto); every trial has to differ")
    return tuple(requested)


def canonical(value: Any) -> Any:
    """Return one spelling for values that train the same."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, (list, tuple)):
        return [canonical(v) for v in value]
    return "auto" if value is None else value


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def _word(given: Mapping[str, Any], name: str, words: tuple[str, ...], *, default: str) -> str:
    value = given.get(name, default)
    if value not in words:
        raise refusal(name, f"{name} {str(value)[:80]!r} is not one of {', '.join(words)}")
    return str(value)


def _whole(given: Mapping[str, Any], name: str, low: int, high: int, *, default: int) -> int:
    value = given.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise refusal(name, f"{name} {str(value)[:80]!r} is not a whole number from {low} to {high}")
    return value


def refusal(name: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_sweep", param=name if name == "sweep" else f"sweep.{name}")


class SweepStatus(enum.StrEnum):
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Trial(NamedTuple):
    """Present state of one trial; `state` None: it waits for room, or was refused at submission."""

    number: int
    state: JobState | None
    refused: bool
    value: float | None
    """Value of the sweep's metric."""


def status_of(trials: Sequence[Trial], *, cancelled: bool) -> SweepStatus:
    """Return the status of the whole sweep. Rules in order:

    1. Cancelled by its tenant: cancelled.
    2. A trial waits or runs: running.
    3. A trial succeeded: succeeded, whatever happened to the others.
    4. Every trial was cancelled: cancelled; else failed.
    """
    if cancelled:
        return SweepStatus.CANCELLED
    if any(not t.refused and (t.state is None or t.state not in FINAL) for t in trials):
        return SweepStatus.RUNNING
    if any(t.state is JobState.SUCCEEDED for t in trials):
        return SweepStatus.SUCCEEDED
    all_cancelled = all(t.state is JobState.CANCELLED for t in trials)
    return SweepStatus.CANCELLED if all_cancelled else SweepStatus.FAILED


def best(trials: Sequence[Trial], goal: Goal) -> int | None:
    """Return the number of the succeeded trial with the best value, the earlier one on a tie; None if none has a value."""
    sign = 1 if goal == "minimize" else -1
    done = [t for t in trials if t.state is JobState.SUCCEEDED]
    rated = [(sign * t.value, t.number) for t in done if t.value is not None and math.isfinite(t.value)]
    return min(rated)[1] if rated else None
