"""Paired tests against what textbooks and scipy say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine.evals.scoring.significance import (
    binomial_at_least,
    binomial_at_most,
    difference,
    holm,
    items_needed,
    least_items,
    mean_difference,
)


def test_zeros_and_ones_are_tested_as_mcnemar_does() -> None:
    gains = [1.0] * 15 + [-1.0] * 5 + [0.0] * 80
    found = difference(gains)
    assert found.mean == pytest.approx(0.1)
    assert found.p_better == pytest.approx(0.020694732666015625)  # binomtest(15, 20, alternative="greater")
    assert found.p_worse == pytest.approx(0.994091033935546875)
    assert found.interval.low > 0


def test_other_sizes_are_tested_by_flipping_signs() -> None:
    few = difference([0.1, 0.2, 0.3, 0.4, 0.5])
    assert few.p_better == pytest.approx(1 / 32)
    many = difference(list(np.linspace(0.1, 1.0, 40)))
    assert many.p_better == pytest.approx(1e-4)
    assert difference([0.5, -0.25] * 20).p_better == pytest.approx(difference([0.5, -0.25] * 20).p_better)


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_no_number_is_no_gain(odd: float) -> None:
    with pytest.raises(ValueError, match="1 of 2 gains"):
        difference([odd, 0.1])
    with pytest.raises(ValueError, match="1 of 2 gains"):
        mean_difference([[0.1], [odd, 0.2]])


def test_items_count_by_their_weight() -> None:
    assert difference([1.0, -1.0], [3.0, 1.0]).mean == pytest.approx(0.5)


def test_the_interval_of_a_weighted_gain_is_that_of_its_weighted_mean() -> None:
    """Twenty gains of weight 3 and twenty losses of weight 1: with k gains drawn of 40 the mean is (3k - (40 - k)) / (3k + (40 - k)),
    and k lies in 14..26 in 95 % of draws."""
    found = difference([1.0] * 20 + [-1.0] * 20, [3.0] * 20 + [1.0] * 20)
    assert (found.interval.low, found.interval.high) == (pytest.approx(16 / 68, abs=0.02), pytest.approx(64 / 92, abs=0.02))
    ignored = difference([1.0] * 9 + [-100.0] * 9, [1.0] * 9 + [0.0] * 9)
    assert (ignored.mean, ignored.interval.low, ignored.interval.high) == (1.0, 1.0, 1.0)


def test_the_interval_of_a_mean_over_suites_draws_items_within_their_suite() -> None:
    """Of the first suite's ten items half are gained: 2 to 8 of them in 95 % of draws, and the other suite never moves."""
    found = mean_difference([[1.0, 0.0] * 5, [0.0] * 1000])
    assert (found.interval.low, found.interval.high) == (pytest.approx(0.1, abs=0.03), pytest.approx(0.4, abs=0.03))


def test_a_mean_over_suites_counts_each_suite_alike() -> None:
    assert mean_difference([[1.0] * 10, [0.0] * 1000]).mean == pytest.approx(0.5)


def test_no_difference_is_no_difference() -> None:
    for found in (difference([]), difference([0.0] * 50)):
        assert (found.mean, found.interval.low, found.interval.high, found.p_better, found.p_worse) == (0.0, 0.0, 0.0, 1.0, 1.0)


def test_equal_models_are_called_different_as_often_as_alpha_says() -> None:
    random = np.random.default_rng(7)
    p = [difference(list((random.random(60) < 0.5) * 1.0 - (random.random(60) < 0.5) * 1.0)).p_worse for _ in range(400)]
    assert sum(x <= 0.05 for x in p) / len(p) < 0.08


def test_binomial_tails() -> None:
    assert binomial_at_least(60, 100) == pytest.approx(0.028443966820490392)
    assert binomial_at_most(3, 10, 0.5) == pytest.approx(0.171875)
    assert binomial_at_most(3, 10, 0.3) == pytest.approx(0.6496107184)
    assert binomial_at_least(0, 5, 0.1) == 1.0
    assert binomial_at_least(3, 5, 0.0) == 0.0
    assert 0 < binomial_at_least(2600, 5000) < 0.003

    assert binomial_at_least(7, 7, 0.3) == pytest.approx(0.3**7)
    assert binomial_at_least(5, 7, 0.3) == pytest.approx(21 * 0.3**5 * 0.7**2 + 7 * 0.3**6 * 0.7 + 0.3**7)


def test_the_tail_of_a_fair_coin_is_exact_to_the_last_digit() -> None:
    for n in (10, 41, 300):
        for k in range(1, n + 1):
            assert binomial_at_least(k, n) == sum(math.comb(n, i) for i in range(k, n + 1)) / 2**n


def test_holm_steps_down_and_stops() -> None:
    assert holm({"a": 0.001, "b": 0.004, "c": 0.02}, alpha=0.01) == {"a": True, "b": True, "c": False}
    assert holm({"a": 0.006, "b": 0.006}, alpha=0.01) == {"a": False, "b": False}
    assert holm({}, alpha=0.01) == {}
    # alpha / 3, then alpha / 2: "c" alone would pass at alpha, and all three pass Benjamini and Hochberg's 0.01, 0.02, 0.03.
    assert holm({"a": 0.005, "b": 0.018, "c": 0.025}, alpha=0.03) == {"a": True, "b": False, "c": False}


def test_how_few_items_can_tell_anything_and_how_many_tell_a_difference() -> None:
    assert (least_items(0.01), least_items(0.05)) == (7, 5)
    assert all(2.0 ** -least_items(a) <= a < 2.0 ** (1 - least_items(a)) for a in (0.01, 0.05))
    assert items_needed(0.04, 0.1, alpha=0.01) == pytest.approx(812, rel=0.05)
    assert items_needed(0.08, 0.1, alpha=0.01) < items_needed(0.04, 0.1, alpha=0.01) / 3
    assert not math.isnan(items_needed(0.0, 0.0, alpha=0.01))
