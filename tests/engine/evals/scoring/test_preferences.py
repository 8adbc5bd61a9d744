"""Implicit rewards on held-out preferences: what they are, and when they tell more than chance."""

from __future__ import annotations

import numpy as np
import pytest

from engine.evals.suites.preferences import CHANCE, binomial_tail, of_judged, of_pairs, rewards, wilson

BASE = {"nll": [10.0, 20.0], "tokens": [5.0, 10.0]}


def test_a_reward_is_what_the_adapter_adds_to_an_answers_log_probability() -> None:
    adapter = {"nll": [8.0, 25.0], "tokens": [5.0, 10.0]}
    assert rewards(BASE, adapter, per_token=False).tolist() == [2.0, -5.0]
    assert rewards(BASE, adapter, per_token=True).tolist() == [0.4, -0.5]


def test_the_base_prefers_nothing_to_itself() -> None:
    nothing = np.zeros(30)
    assert of_pairs(nothing, nothing).accuracy == 0.0  # draws count against an adapter
    assert of_judged(nothing, nothing).accuracy == CHANCE
    assert of_judged(nothing, nothing).p_value == pytest.approx(0.5)
    assert of_pairs(nothing, nothing).margin == of_judged(nothing, nothing).margin == 0.0


def test_pairs_are_counted_by_the_sign_of_their_margin() -> None:
    found = of_pairs(np.array([1.0, 2.0, 3.0, 0.0]), np.array([0.0, 1.0, 4.0, -3.0]))
    assert (found.accuracy, found.margin, found.n) == (0.75, 1.0, 4)
    assert found.p_value == pytest.approx(5 / 16)
    assert found.accuracy_interval.low < 0.75 < found.accuracy_interval.high


def test_judged_answers_are_told_apart_whatever_their_number() -> None:
    rng = np.random.default_rng(0)
    good, bad = rng.normal(1.0, 1.0, 60), rng.normal(0.0, 1.0, 25)
    found = of_judged(good, bad)
    exact = float(np.mean(good[:, None] > bad[None, :]))
    assert found.accuracy == pytest.approx(exact)
    assert found.p_value < 0.001
    assert found.accuracy_interval.low < exact < found.accuracy_interval.high
    assert found.margin == pytest.approx(float(good.mean() - bad.mean()))
    assert found.n == 85


@pytest.mark.parametrize(("right", "n", "passes"), [(4, 4, False), (5, 5, True), (14, 20, False), (15, 20, True), (110, 200, False)])
def test_a_share_is_told_from_chance_by_the_binomial(right: int, n: int, passes: bool) -> None:
    assert (binomial_tail(right, n) <= 0.05) is passes


def test_wilsons_interval_is_the_published_one() -> None:
    """Of 15 in 148: Newcombe 1998, table I, method 3 (0.0624 to 0.1605 for 15/148 = 0.1014)."""
    found = wilson(15, 148)
    assert [found.low, found.high] == pytest.approx([0.0624, 0.1605], abs=5e-4)
