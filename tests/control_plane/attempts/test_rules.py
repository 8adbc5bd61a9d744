"""Verdicts on an attempt: each rule raises, holds and lets go where it says, and healthy numbers raise none."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from control_plane.attempts.rules import (
    EARLY_STEPS,
    PLATEAU_STEPS,
    RULES,
    Pace,
    Signs,
    Step,
    faster,
    judge,
    modelled_pace,
    own_pace,
    slow_gpus,
)


def signs(steps: list[Step] | None = None, **given: Any) -> Signs:
    values: dict[str, Any] = {"validations": (), "total_steps": 10_000, "from_step": 0, "silence_s": 0.0, "running": True, **given}
    return Signs(steps=steps or [], **values)


def paced(*pieces: tuple[int, float], data_s: float = 0.0) -> list[Step]:
    """Steps at each pace (tokens/s) for so many steps."""
    paces = [pace for n, pace in pieces for _ in range(n)]
    return [Step(step=i + 1, loss=1.0, tokens_per_s=p, step_s=1.0, data_s=data_s) for i, p in enumerate(paces)]


def curve(losses: list[float]) -> list[Step]:
    return [Step(step=i + 1, loss=v) for i, v in enumerate(losses)]


def codes(given: Signs, raised: tuple[str, ...] = ()) -> list[str]:
    return [v.code for v in judge(given, raised)]


def test_a_healthy_run_has_no_verdicts() -> None:
    noise = random.Random(0)
    losses = [2.5 * math.exp(-i / 300) + 0.4 + noise.gauss(0, 0.05) for i in range(1200)]
    steps = [Step(step=i + 1, loss=v, tokens_per_s=noise.gauss(1000, 80), step_s=1.0, data_s=0.01) for i, v in enumerate(losses)]
    falling = tuple((100 * i, 2.0 / i) for i in range(1, 12))
    for n in range(0, 1200, 40):
        known = signs(steps[:n], validations=falling[: n // 100], total_steps=1200)
        assert codes(replace(known, expected=own_pace(known))) == [], n


CASES = [
    ("heartbeat_missed", signs(silence_s=31.0), signs(silence_s=15.0), signs(silence_s=2.0)),
    (
        "throughput_low",
        signs(paced((40, 1000.0), (20, 480.0)), expected=Pace(tokens_per_s=1000.0, source="history")),
        signs(paced((40, 1000.0), (20, 550.0)), expected=Pace(tokens_per_s=1000.0, source="history")),
        signs(paced((40, 1000.0), (20, 650.0)), expected=Pace(tokens_per_s=1000.0, source="history")),
    ),
    ("data_starved", *(signs(paced((30, 1000.0), data_s=waited)) for waited in (0.25, 0.15, 0.06))),
    ("loss_exploding", signs(curve([1.0] * 30 + [2.5] * 10)), signs(curve([1.0] * 30 + [1.7] * 10)), signs(curve([1.0] * 30 + [1.3] * 10))),
    (
        "loss_plateau",
        signs(curve([1.0] * 450), total_steps=1000),
        signs(curve([1.0] * 300 + [0.94] * 150), total_steps=1000),
        signs(curve([1.0] * 300 + [0.90] * 150), total_steps=1000),
    ),
    (
        "overfitting",
        signs(validations=((1, 1.2), (2, 1.0), (3, 1.05), (4, 1.06))),
        signs(validations=((1, 1.2), (2, 1.0), (3, 1.05), (4, 1.015))),
        signs(validations=((1, 1.2), (2, 1.0), (3, 1.05), (4, 1.005))),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("code", "bad", "between", "good"), [pytest.param(*c, id=c[0]) for c in CASES])
def test_a_verdict_is_raised_at_one_limit_and_kept_until_an_easier_one(code: str, bad: Signs, between: Signs, good: Signs) -> None:
    assert codes(bad) == [code]
    assert codes(between) == []
    assert codes(between, (code,)) == [code]
    assert codes(good, (code,)) == []


def test_every_rule_has_a_case() -> None:
    assert {c[0] for c in CASES} | {"loss_not_finite"} == set(RULES)


def test_every_verdict_says_value_limit_whom_it_concerns_and_what_to_do() -> None:
    for code, bad, _, _ in CASES:
        (verdict,) = judge(bad)
        assert verdict.audience == ("operator" if code in ("heartbeat_missed", "throughput_low", "data_starved") else "tenant")
        assert verdict.level == ("info" if code == "loss_plateau" else "warn")
        assert verdict.value is not None and verdict.limit is not None
        assert f"Next: {verdict.next_step}." in verdict.message


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_an_error_until_the_next_one_is_one(loss: float) -> None:
    broken = [Step.of({"step": 1, "loss": 2.0}), Step.of({"step": 2, "loss": loss})]
    (verdict,) = judge(signs(broken))
    assert (verdict.code, verdict.level, verdict.audience) == ("loss_not_finite", "error", "tenant")
    assert codes(signs([*broken, Step(step=3, loss=2.0)]), ("loss_not_finite",)) == []
    assert codes(signs([Step.of({"step": 2, "train_loss": None})])) == ["loss_not_finite"], "null is how an event says it"


def test_an_attempt_without_history_is_held_against_its_own_early_steps() -> None:
    known = signs(paced((3, 10.0), (20, 1000.0), (40, 300.0)))
    pace = own_pace(known)
    assert pace is not None and pace.tokens_per_s == 1000.0, "the settling steps say nothing"
    (verdict,) = judge(replace(known, expected=pace))
    assert verdict.code == "throughput_low"
    assert "30% of the 1,000 expected (the median of 20 early steps of its own)" in verdict.message
    assert own_pace(signs(paced((22, 1000.0)))) is None


@pytest.mark.parametrize(("total_steps", "reported"), [(10_000, 13), (12, 9), (6, 6)])
def test_run_that_is_slow_from_its_first_step_is_held_against_the_cost_model(total_steps: int, reported: int) -> None:
    steps = [Step(step=n + 1, tokens_per_s=400.0, step_s=2.5) for n in range(reported)]
    known = signs(steps, total_steps=total_steps)
    (verdict,) = judge(replace(known, expected=modelled_pace(known, 1.0)))
    assert verdict.code == "throughput_low" and "40% of the 1,000 expected (the cost model" in verdict.message
    assert codes(replace(known, expected=modelled_pace(known, 1.3))) == [], "above half"
    assert codes(replace(known, steps=steps[:-1], expected=modelled_pace(known, 1.0))) == [], "too few steps to tell"
    assert modelled_pace(signs(), 1.0) is None


def test_faster_pace_counts() -> None:
    slow, fast = Pace(tokens_per_s=1.0, source="a"), Pace(tokens_per_s=2.0, source="b")
    assert faster(slow, fast) is fast and faster(fast, None) is fast and faster(None, slow) is slow and faster(None, None) is None


def test_pace_and_waiting_are_judged_behind_the_start_of_the_attempt() -> None:
    slow_before = paced((40, 100.0), (2, 1000.0), data_s=0.9)
    assert codes(signs(slow_before, from_step=40, expected=Pace(tokens_per_s=1000.0, source="history"))) == []


def test_a_process_that_has_ended_is_not_silent() -> None:
    assert codes(signs(silence_s=500.0, running=False)) == []


def test_a_small_loss_may_double() -> None:
    assert codes(signs(curve([0.02] * 30 + [0.06] * 10))) == []


def test_a_curve_is_flat_at_the_end_by_design() -> None:
    assert codes(signs(curve([1.0] * PLATEAU_STEPS), total_steps=PLATEAU_STEPS + 50)) == []


def told(shape: Callable[[float], float], *, total: int, noise: float, seed: int) -> set[str]:
    """Verdicts on the losses of a run whose curve has this shape, at any time of it; a watch keeps the newest 2,000 steps."""
    drawn = random.Random(seed)
    steps = curve([shape(i / total) * (1 + drawn.gauss(0, noise)) for i in range(total)])
    looks = range(200, total + 1, 200)
    return {c for n in looks for c in codes(signs(steps[max(0, n - 2000) : n], early=steps[: min(n, EARLY_STEPS)], total_steps=total))}


@pytest.mark.parametrize("noise", [0.1, 0.3])
@pytest.mark.parametrize("total", [2000, 6000])
def test_noise_around_a_curve_that_falls_or_has_converged_raises_nothing(total: int, noise: float) -> None:
    for seed in range(4):
        assert told(lambda done: 1.2 + 0.8 * math.exp(-done * total / 150), total=total, noise=noise, seed=seed) == set()
        assert told(lambda done: 2.0 - done, total=total, noise=noise, seed=seed) == set()


@pytest.mark.parametrize("total", [2000, 6000])
def test_a_loss_that_never_fell_is_a_plateau_through_noise(total: int) -> None:
    assert [told(lambda done: 1.5, total=total, noise=0.1, seed=seed) for seed in range(4)] == [{"loss_plateau"}] * 4
    through_much = [told(lambda done: 1.5, total=total, noise=0.3, seed=seed) for seed in range(4)]
    assert through_much.count({"loss_plateau"}) >= 3 and "loss_exploding" not in set().union(*through_much)


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_an_explosion_is_found_through_noise(noise: float) -> None:
    for seed in range(4):
        assert "loss_exploding" in told(lambda done: 1.2 if done < 0.6 else 1.2 + 20 * (done - 0.6), total=2000, noise=noise, seed=seed)


def test_one_worse_validation_is_no_overfitting() -> None:
    assert codes(signs(validations=((1, 1.2), (2, 1.0), (3, 1.5)))) == []


def test_a_best_validation_of_long_ago_counts() -> None:
    rising = tuple((step, loss) for step, loss in enumerate((1.0, 1.5, 1.5, 1.51, 1.52), 1))
    assert codes(signs(validations=rising)) == ["overfitting"]


def test_a_gpu_is_compared_with_the_others_and_not_with_itself() -> None:
    found = slow_gpus({"a": 1500.0, "b": 1900.0})
    assert found is not None and found.value == 1500.0 and "a runs at 1,500 MHz, its peers at 1,900" in found.message
    assert slow_gpus({"a": 1600.0, "b": 1900.0}) is None
    assert slow_gpus({"a": 300.0}) is None, "alone, it has no peers"
