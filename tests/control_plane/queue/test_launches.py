"""Limits of runs without a reservation: what the defaults carry, and what they leave to others."""

from __future__ import annotations

import math

import pytest

from control_plane.platform.settings import load
from control_plane.queue.launches import limits, per_tenant

PLANNED_GPUS = 325
JOBS_PER_HOUR = 500 / 24


def share_that_waits(load: float, slots: int) -> float:
    """Erlang's C formula: the share of arrivals that find every slot taken."""
    busy = load**slots / math.factorial(slots) * slots / (slots - load)
    return busy / (sum(load**n / math.factorial(n) for n in range(slots)) + busy)


@pytest.mark.parametrize(("stage", "hours"), [("evaluate", 0.5), ("prepare", 1 / 6)])
def test_at_the_planned_size_one_run_in_twenty_waits_for_a_slot(stage: str, hours: float) -> None:
    slots = getattr(limits(PLANNED_GPUS), stage)
    assert slots / hours > 1.5 * JOBS_PER_HOUR
    assert share_that_waits(JOBS_PER_HOUR * hours, slots) < 0.05


def test_a_small_machine_is_not_overloaded_and_never_left_to_one_tenant() -> None:
    for num_gpus in (1, 8):
        small = limits(num_gpus)
        assert (small.prepare, small.evaluate) == (4, 2)
        assert (per_tenant(small.prepare), per_tenant(small.evaluate)) == (2, 1)
    assert per_tenant(1) == 1


def test_the_operator_may_choose() -> None:
    settings = load({"FT_PREPARE_RUNS": "3", "FT_EVALUATE_RUNS": "40"})
    chosen = limits(1, prepare=settings.prepare_runs, evaluate=settings.evaluate_runs)
    assert (chosen.prepare, chosen.evaluate) == (3, 40)
    with pytest.raises(ValueError, match="FT_EVALUATE_RUNS is 0; use 1 or more"):
        load({"FT_EVALUATE_RUNS": "0"})
