"""Verdicts on a running attempt: what is wrong, for whom, and what to do. Pure: numbers in, verdicts out.

Each rule has two limits: one that raises the verdict and an easier one that clears it, so that a value that swings around its limit makes
one episode and not a hundred.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, Self

from control_plane.platform.job_events import Level

Audience = Literal["tenant", "operator"]

HEARTBEAT_LIMIT_S, HEARTBEAT_AGAIN_S = 30.0, 10.0
"""A thread writes a heartbeat every 2 s; one is promised every 5 s."""
SETTLING_STEPS = 3
"""First steps of an attempt, which do not show its pace: kernels are chosen, caches and allocator fill."""
BASELINE_STEPS = 20
"""Steps after the settling ones whose median is the expected pace if there is no history."""
PACE_STEPS = 20
"""Newest steps that are judged; one slow step does not move their median."""
FEWEST_STEPS = 3
"""Least steps whose pace is judged, of a short run; of a longer one half of :data:`PACE_STEPS`."""
SLOW_BELOW, SLOW_UNTIL = 0.5, 0.6
"""Limits as shares of the expected tokens/s."""
SLOW_GPU, SLOW_GPU_BELOW = "gpu_slow", 0.8
"""Code of the verdict, and share of its peers' clock below which a GPU is slow."""
STARVED_ABOVE, STARVED_UNTIL = 0.2, 0.1
"""Limits as shares of step time spent waiting for data."""
STARVED_MIN_S = 1.0
"""Seconds lost to waiting within the window below which no action is needed."""
EXPLODED_ABOVE, EXPLODED_UNTIL, EXPLODED_BY = 2.0, 1.5, 0.5
"""Limits as multiples of the lowest median of many steps, and the least distance to it: a small loss can double by chance."""
LOSS_STEPS, BEST_STEPS = 10, 100
"""Newest steps whose median is judged, and the steps of each median it is compared with (a third of the existing ones at first): the
lowest of many short medians is low by chance."""
EXPLODED_ERRORS = 4.0
"""Standard errors by which the newest median must exceed the best one."""
EARLY_STEPS = 500
"""First steps of a job, kept as long as it runs: a plateau is a loss that never left them."""
PLATEAU_STEPS = 400
"""Least steps before a plateau is reported; a third of them is compared with the first third."""
PLATEAU_BELOW, PLATEAU_UNTIL = 0.05, 0.08
"""Relative fall since the start, including its standard errors."""
PLATEAU_AFTER, PLATEAU_BEFORE = 0.3, 0.8
"""Shares of the run in which plateaus are judged: early, a slow fall looks flat; late, a flat curve is how a schedule should end."""
PLATEAU_ERRORS, FELL_ERRORS = 2.0, 3.0
STARTS = (20, 50, 100, 200)
"""Numbers of first steps from which a loss may have fallen at once: then it has converged and is not a plateau."""
NEWEST_STEPS = 1000
NEGLIGIBLE_LOSS = 0.01
OVERFIT_ABOVE, OVERFIT_UNTIL = 1.02, 1.01
"""Multiples of the best validation loss; two validations in a row must exceed the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Report of one optimizer step; None for missing values."""

    step: int
    loss: float | None = None
    tokens_per_s: float | None = None
    step_s: float | None = None
    data_s: float | None = None

    @classmethod
    def of(cls, metric: Mapping[str, Any]) -> Self:
        """Read a line of ``metrics.jsonl`` or the data of a metrics event, where a non-finite loss is null."""
        name = "loss" if "loss" in metric else "train_loss"
        loss = math.nan if metric.get(name, 0.0) is None else metric.get(name)
        return cls(step=metric["step"], loss=loss, **{k: metric.get(k) for k in ("tokens_per_s", "step_s", "data_s")})


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Tokens per second that an attempt should reach."""

    tokens_per_s: float
    source: str
    """In words, for the message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signs:
    """What is known of an attempt now."""

    steps: Sequence[Step]
    """The job's newest steps, oldest first; if a step was trained twice, the last report."""
    validations: Sequence[tuple[int, float]]
    """Step and loss, oldest first."""
    total_steps: int
    from_step: int
    """Step at which this attempt began: pace and waiting are judged after it."""
    silence_s: float
    """Seconds since the workload's last sign of life."""
    running: bool
    expected: Pace | None = None
    """None while unknown."""
    early: Sequence[Step] = ()
    """The job's first :data:`EARLY_STEPS`, if `steps` no longer has them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    code: str
    audience: Audience
    level: Level
    message: str
    """Value, limit and next step."""
    value: float | None
    limit: float | None
    next_step: str


def judge(signs: Signs, raised: Collection[str] = ()) -> list[Verdict]:
    """Return the verdicts that hold now; those in `raised` hold until their easier limit is passed.

    1. Operators: no heartbeat for 30 s.
    2. Operators: throughput under 50 % of similar jobs; without any, of what the cost model expects or of its own early steps.
    3. Operators: over 20 % of the time of the newest steps spent waiting for data.
    4. Tenant: a loss that is not a number.
    5. Tenant: the loss is at twice its best.
    6. Tenant: the loss has not fallen since the start.
    7. Tenant: the validation loss rises while training continues.
    """
    found = (rule(signs, code in raised) for code, rule in RULES.items())
    return [v for v in found if v is not None]


def diverged(*, step: int, remedy: str) -> Verdict:
    """Return the verdict on an attempt whose evidence shows that it diverged: the step was refused before it was reported."""
    message = f"The loss or a gradient of step {step} was not finite, or the loss exploded; training stopped. Next: {remedy}."
    return Verdict(code=NOT_FINITE, audience="tenant", level="error", message=message, value=None, limit=None, next_step=remedy)


def own_pace(signs: Signs) -> Pace | None:
    """Return the pace of the attempt's early steps once there are enough."""
    early = _paces(signs)[:BASELINE_STEPS]
    if len(early) < BASELINE_STEPS:
        return None
    return Pace(tokens_per_s=median(early), source=f"the median of {BASELINE_STEPS} early steps of its own")


def modelled_pace(signs: Signs, step_s: float) -> Pace | None:
    """Return the pace of an attempt whose steps, with the tokens that they have, take `step_s` each, as the cost model expects."""
    tokens = [s.tokens_per_s * s.step_s for s in _settled(signs) if s.tokens_per_s and s.step_s]
    if not tokens:
        return None
    return Pace(tokens_per_s=median(tokens) / step_s, source="the cost model, corrected by earlier jobs on such GPUs")


def faster(one: Pace | None, other: Pace | None) -> Pace | None:
    """Return the higher of two paces: a run that starts slowly is held against the one, a run that slows down against the other."""
    return max((pace for pace in (one, other) if pace is not None), key=lambda pace: pace.tokens_per_s, default=None)


def slow_gpus(clocks: Mapping[str, float]) -> Verdict | None:
    """Return the verdict on GPUs of one attempt whose clock (MHz) is below :data:`SLOW_GPU_BELOW` of the median of the others'."""
    peers = {gpu: median([c for other, c in clocks.items() if other != gpu] or [0.0]) for gpu in clocks}
    slow = [gpu for gpu in sorted(clocks) if clocks[gpu] < SLOW_GPU_BELOW * peers[gpu]]
    if not slow:
        return None
    return _verdict(
        SLOW_GPU, "operator", value=clocks[slow[0]], limit=SLOW_GPU_BELOW * peers[slow[0]],
        text="; ".join(f"{gpu} runs at {clocks[gpu]:,.0f} MHz, its peers at {peers[gpu]:,.0f}" for gpu in slow),
        next_step="look at its temperature, power and clock limits (nvidia-smi -q -d PERFORMANCE), and drain the node if it stays slow",
    )  # fmt: skip


def _silent(signs: Signs, raised: bool) -> Verdict | None:
    if not signs.running or signs.silence_s <= (HEARTBEAT_AGAIN_S if raised else HEARTBEAT_LIMIT_S):
        return None
    return _verdict(
        "heartbeat_missed", "operator", value=signs.silence_s, limit=HEARTBEAT_LIMIT_S,
        text=f"No heartbeat of the training process for {signs.silence_s:.0f} s, over {HEARTBEAT_LIMIT_S:.0f} s",
        next_step="look at the node's load and the attempt's log; a process that stays silent is stopped and resumed automatically",
    )  # fmt: skip


def _slow(signs: Signs, raised: bool) -> Verdict | None:
    judged, pace = _paces(signs)[-PACE_STEPS:], signs.expected
    enough = min(PACE_STEPS // 2, max(FEWEST_STEPS, (signs.total_steps - signs.from_step) // 2))
    if pace is None or len(judged) < enough:
        return None
    now, limit = median(judged), SLOW_BELOW * pace.tokens_per_s
    if now >= (SLOW_UNTIL * pace.tokens_per_s if raised else limit):
        return None
    return _verdict(
        "throughput_low", "operator", value=now, limit=limit,
        text=f"{now:,.0f} tokens/s over the last {len(judged)} steps, {now / pace.tokens_per_s:.0%} of the {pace.tokens_per_s:,.0f} "
        f"expected ({pace.source})",
        next_step="look for other load on the node, a throttled device, or slow data loading",
    )  # fmt: skip


def _starved(signs: Signs, raised: bool) -> Verdict | None:
    timed = [s for s in _settled(signs) if s.step_s is not None and s.data_s is not None][-PACE_STEPS:]
    waited, total = math.fsum(s.data_s or 0.0 for s in timed), math.fsum(s.step_s or 0.0 for s in timed)
    if len(timed) < PACE_STEPS // 2 or total <= 0 or waited < STARVED_MIN_S:
        return None
    share = waited / total
    if share <= (STARVED_UNTIL if raised else STARVED_ABOVE):
        return None
    return _verdict(
        "data_starved", "operator", value=share, limit=STARVED_ABOVE,
        text=f"The device waited for data during {share:.0%} of the last {len(timed)} steps, over {STARVED_ABOVE:.0%}",
        next_step="look at the disk that holds the pack and at the CPU load of the node",
    )  # fmt: skip


def _not_finite(signs: Signs, _raised: bool) -> Verdict | None:
    newest = signs.steps[-1:]
    if not newest or newest[0].loss is None or math.isfinite(newest[0].loss):
        return None
    return _verdict(
        NOT_FINITE, "tenant", level="error", value=None, limit=None, text=f"The loss of step {newest[0].step} is not a number",
        next_step="lower learning_rate to a third, or raise warmup_ratio; then look for garbled rows",
    )  # fmt: skip


def _exploding(signs: Signs, raised: bool) -> Verdict | None:
    losses = _losses(signs.steps)
    earlier = losses[:-LOSS_STEPS]
    length = max(LOSS_STEPS, min(BEST_STEPS, len(earlier) // 3))
    blocks = [_middle(earlier[i : i + length]) for i in range(0, len(earlier) - length + 1, length)]
    if len(blocks) < 2:
        return None
    now, (best, error) = median(losses[-LOSS_STEPS:]), min(blocks)
    times = EXPLODED_UNTIL if raised else EXPLODED_ABOVE
    if now <= times * best or now - best <= max(EXPLODED_BY, EXPLODED_ERRORS * error):
        return None
    return _verdict(
        "loss_exploding", "tenant", value=now, limit=EXPLODED_ABOVE * best,
        text=f"The loss is {now:.3f} over the last {LOSS_STEPS} steps; its best was {best:.3f}, and {EXPLODED_ABOVE:g} times that is "
        "an explosion",
        next_step="cancel and submit with a third of learning_rate, or more warmup_ratio, unless it comes down again",
    )  # fmt: skip


def _flat(signs: Signs, raised: bool) -> Verdict | None:
    early = _losses(signs.early or signs.steps)[:EARLY_STEPS]
    losses = _losses(signs.steps)
    done = signs.steps[-1].step if signs.steps else 0
    if len(losses) < PLATEAU_STEPS or not PLATEAU_AFTER * signs.total_steps <= done < PLATEAU_BEFORE * signs.total_steps:
        return None
    first = early[: done // 3]
    before, now = _mean(first), _mean(losses[-min(done // 3, NEWEST_STEPS) :])
    if before.value <= NEGLIGIBLE_LOSS or _exploding(signs, raised=True):
        return None
    gained = (before.value - now.value) / before.value
    at_most = gained if raised else gained + PLATEAU_ERRORS * _error(before, now) / before.value
    limit = PLATEAU_UNTIL if raised else PLATEAU_BELOW
    if at_most >= limit or any(_fell(_mean(early[:n]), now, by=limit) for n in STARTS):
        return None
    return _verdict(
        "loss_plateau", "tenant", level="info", value=gained, limit=PLATEAU_BELOW,
        text=f"The loss has fallen by {max(gained, 0.0):.1%} since the first {len(first)} steps (from {before.value:.3f} to "
        f"{now.value:.3f}), under {PLATEAU_BELOW:.0%}",
        next_step="the steps that are left may buy little: try a higher learning_rate, or look whether the model knows the data already",
    )  # fmt: skip


def _fell(before: _Mean, now: _Mean, *, by: float) -> bool:
    """Whether the loss is significantly lower, and by enough."""
    return before.value - now.value > max(by * before.value, FELL_ERRORS * _error(before, now))


def _overfitting(signs: Signs, raised: bool) -> Verdict | None:
    if len(signs.validations) < 3:
        return None
    best_step, best = min(signs.validations, key=lambda v: v[1])
    (_, previous), (step, last) = signs.validations[-2:]
    worse = last > OVERFIT_UNTIL * best if raised else min(previous, last) > OVERFIT_ABOVE * best
    if best <= 0 or not worse:
        return None
    return _verdict(
        "overfitting", "tenant", value=last, limit=OVERFIT_ABOVE * best,
        text=f"The validation loss rises: {last:.4f} at step {step}, best {best:.4f} at step {best_step}",
        next_step="set early_stopping or fewer n_epochs, or add data; an earlier checkpoint may be the better model",
    )  # fmt: skip


NOT_FINITE = "loss_not_finite"
RULES: Mapping[str, Callable[[Signs, bool], Verdict | None]] = {
    "heartbeat_missed": _silent,
    "throughput_low": _slow,
    "data_starved": _starved,
    NOT_FINITE: _not_finite,
    "loss_exploding": _exploding,
    "loss_plateau": _flat,
    "overfitting": _overfitting,
}
ONCE = frozenset({"loss_plateau"})
"""Verdicts that are reported to an attempt once, however often they come and go."""


@dataclass(frozen=True, slots=True)
class _Mean:
    value: float
    error: float
    """Its standard error."""


def _mean(values: Sequence[float]) -> _Mean:
    mean = math.fsum(values) / len(values)
    variance = math.fsum((v - mean) ** 2 for v in values) / max(1, len(values) - 1)
    return _Mean(mean, math.sqrt(variance / len(values)))


def _error(one: _Mean, other: _Mean) -> float:
    """Standard error of their difference."""
    return math.hypot(one.error, other.error)


def _middle(values: Sequence[float]) -> tuple[float, float]:
    """Return the median, and the standard error of a median of :data:`LOSS_STEPS` such values; outliers move neither."""
    middle = median(values)
    scatter = 1.4826 * median(abs(v - middle) for v in values)
    return middle, 1.2533 * scatter / math.sqrt(LOSS_STEPS)


def _settled(signs: Signs) -> list[Step]:
    return [s for s in signs.steps if s.step > signs.from_step + SETTLING_STEPS]


def _paces(signs: Signs) -> list[float]:
    return [s.tokens_per_s for s in _settled(signs) if s.tokens_per_s]


def _losses(steps: Sequence[Step]) -> list[float]:
    return [s.loss for s in steps if s.loss is not None and math.isfinite(s.loss)]


def _verdict(
    code: str, audience: Audience, *, text: str, next_step: str, value: float | None, limit: float | None, level: Level = "warn"
) -> Verdict:
    message = f"{text}. Next: {next_step}."
    return Verdict(code=code, audience=audience, level=level, message=message, value=value, limit=limit, next_step=next_step)
