"""Estimates as the platform makes them, in a simulation."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks.estimates import published
from benchmarks.scheduler.simulation import policies, report, synthetic
from benchmarks.scheduler.simulation.model_estimates import RUNS, ModelEstimates
from benchmarks.scheduler_sim import cluster
from engine.scheduler.simulation.cluster_simulation import Simulation
from engine.scheduler.simulation.outcome import Outcome
from engine.scheduler.simulation.simulated_job import SimulatedJob

JOBS = synthetic.planned_mix(5, days=0.5, premium="share")


def run(jobs: list[SimulatedJob], *, history: bool, gpus: int = 216) -> Outcome:
    estimates = ModelEstimates(jobs, seed=5, history=history)
    return Simulation(jobs, [cluster(gpus)], policies.named("ours"), estimates=estimates, seed=5).run()


def test_the_cost_model_is_wrong_by_as_much_as_published_throughputs_say() -> None:
    ratios = published.held_out(published.read())
    estimates = ModelEstimates(JOBS, seed=5, history=False)
    took = [job.duration_s / estimates.expected_s(job) for job in JOBS]
    lowest, highest = ratios[0] * math.exp(-5 * RUNS), ratios[-1] * math.exp(5 * RUNS)
    assert all(lowest < one < highest for one in took)
    mean, sigma = published.spread(took)
    assert mean == pytest.approx(published.spread(ratios)[0], rel=0.2)
    assert sigma == pytest.approx(math.hypot(published.spread(ratios)[1], RUNS), rel=0.3)


def test_history_takes_the_bias_from_later_estimates() -> None:
    alone, learned = run(JOBS, history=False), run(JOBS, history=True)
    assert report.estimate_error(learned) < 0.9 * report.estimate_error(alone)
    assert not alone.broken and not learned.broken
    assert all(r.end is not None for r in learned.records)


def test_a_job_that_runs_is_expected_to_end_by_its_pace_and_one_that_comes_back_to_need_its_share() -> None:
    job = JOBS[0]
    estimates = ModelEstimates([job], seed=5, history=False)
    wrong = job.duration_s / 3
    ran = job.duration_s / 2
    left = estimates.remaining_s(job, wrong, ran_s=ran, load_s=0.0, done_s=0.0)
    assert left == pytest.approx(job.duration_s - ran, rel=0.1)
    assert estimates.left_s(job, wrong, done_s=ran) == pytest.approx(wrong / 2)
    assert estimates.remaining_s(job, wrong, ran_s=0.0, load_s=60.0, done_s=0.0) == pytest.approx(wrong + 60.0)


def test_two_simulations_of_a_seed_are_one() -> None:
    jobs = random.Random(1).sample(JOBS, 60)
    assert run(jobs, history=True, gpus=64).log == run(jobs, history=True, gpus=64).log
