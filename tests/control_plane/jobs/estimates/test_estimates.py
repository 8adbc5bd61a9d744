"""Expected durations, corrected by what finished jobs took."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from control_plane.jobs.estimates.rules import Finished, Kind, correction, remaining_s, weighted_median

KIND = Kind(gpu_type="h100-80gb", model="llama-8b", way="sft/lora", num_gpus=8)


def took(ratio: float, *, modelled: float = 1000.0, kind: Kind = KIND) -> Finished:
    return Finished(kind=kind, modelled_s=modelled, took_s=ratio * modelled)


def biased(bias: float, num: int, *, spread: float = 0.1, seed: int = 0) -> list[Finished]:
    draw = random.Random(seed)
    return [took(bias * math.exp(draw.gauss(0.0, spread)), modelled=draw.uniform(60, 1e5)) for _ in range(num)]


def error(jobs: Sequence[Finished], ratio: float) -> float:
    """Mean of how far the estimate is off, of the estimate."""
    return sum(abs(j.took_s - ratio * j.modelled_s) / (ratio * j.modelled_s) for j in jobs) / len(jobs)


@pytest.mark.parametrize("bias", [1.8, 0.4, 6.0])
def test_a_history_with_a_bias_takes_it_from_the_estimates(bias: float) -> None:
    history, coming = biased(bias, 20, spread=0.05), biased(bias, 50, spread=0.05, seed=1)
    learned = correction(KIND, history)
    assert error(coming, 1.0) == pytest.approx(abs(bias - 1.0), rel=0.05)
    assert error(coming, learned.ratio) < 0.10
    assert (learned.num_jobs, learned.num_alike) == (20, 20)


def test_without_history_the_cost_model_stands_alone() -> None:
    nothing = correction(KIND, [])
    assert (nothing.ratio, nothing.num_jobs) == (1.0, 0)
    assert nothing.low < 0.5 and nothing.high > 2.0


def test_one_job_says_something_and_not_all() -> None:
    assert 1.2 < correction(KIND, [took(1.8)]).ratio < 1.8


def test_one_job_that_hung_changes_little() -> None:
    steady = correction(KIND, [took(1.8)] * 9).ratio
    assert correction(KIND, [took(25.0), *[took(1.8)] * 9]).ratio == pytest.approx(steady, rel=0.02)


def test_a_broken_record_is_kept_within_bounds() -> None:
    assert correction(KIND, [took(1e6)]).ratio <= 30.0
    assert correction(KIND, [took(0.0), Finished(kind=KIND, modelled_s=0.0, took_s=5.0)]).num_jobs == 0


def test_the_newest_jobs_count_most() -> None:
    before, after = [took(1.0)] * 60, [took(2.0)] * 15
    assert correction(KIND, after + before).ratio > 1.8 > correction(KIND, before + after).ratio


def test_a_new_model_starts_from_the_pace_of_its_gpus_and_another_gpu_from_nothing() -> None:
    other = [took(1.8, kind=replace(KIND, model="qwen-7b"))] * 10
    assert correction(KIND, other).ratio == pytest.approx(1.8, rel=0.1)
    elsewhere = [took(1.8, kind=replace(KIND, gpu_type="local"))] * 10
    assert correction(KIND, elsewhere).ratio == 1.0


def test_jobs_alike_outweigh_others_on_the_same_gpus() -> None:
    other = [took(0.5, kind=replace(KIND, way="dpo/lora"))] * 50
    assert correction(KIND, [took(3.0)] * 10 + other).ratio == pytest.approx(3.0, rel=0.3)


def test_jobs_on_as_many_gpus_outweigh_those_on_fewer() -> None:
    narrow = [took(1.0, kind=replace(KIND, num_gpus=1))] * 50
    learned = correction(KIND, [took(2.0)] * 10 + narrow)
    assert learned.ratio == pytest.approx(2.0, rel=0.15)
    assert (learned.num_jobs, learned.num_alike) == (60, 10)
    assert correction(KIND, narrow).num_alike == 0


def test_the_band_holds_eight_of_ten() -> None:
    coming = [j.took_s / j.modelled_s for j in biased(1.8, 500, spread=0.3, seed=99)]
    bands = [correction(KIND, biased(1.8, 100, spread=0.3, seed=seed)) for seed in range(20)]
    inside = sum(band.low <= ratio <= band.high for band in bands for ratio in coming) / (len(bands) * len(coming))
    assert inside == pytest.approx(0.8, abs=0.07)


def test_the_weighted_median_lies_between_two_where_half_is_reached_there() -> None:
    assert weighted_median([1.0, 3.0], [1.0, 1.0]) == 2.0
    assert weighted_median([1.0, 3.0, 9.0], [1.0, 1.0, 5.0]) == 9.0


def test_what_is_left_is_the_estimate_until_there_are_steps() -> None:
    assert remaining_s(expected_s=1000, ran_s=100, setup_s=30) == 900
    assert remaining_s(expected_s=1030, ran_s=130, setup_s=30, total_steps=100) == 900
    assert remaining_s(expected_s=1000, ran_s=5000, setup_s=30) == 500, "an overdue job does not end at once"


def test_what_is_left_follows_the_pace() -> None:
    twice_as_slow = remaining_s(expected_s=1030, ran_s=30 + 50 * 20, setup_s=30, step=50, total_steps=100)
    assert twice_as_slow == pytest.approx(50 * 20, rel=0.06)
    assert remaining_s(expected_s=1030, ran_s=2000, setup_s=30, step=100, total_steps=100) == 0.0


def test_an_attempt_that_resumes_owes_only_the_steps_after_its_checkpoint() -> None:
    assert remaining_s(expected_s=1030, ran_s=0, setup_s=30, from_step=80, total_steps=100) == pytest.approx(30 + 200)
    going = remaining_s(expected_s=1030, ran_s=30 + 100, setup_s=30, step=90, from_step=80, total_steps=100)
    assert going == pytest.approx(100, rel=0.05)
