"""Limits of runs without a reservation: what the defaults carry, and what they leave to others."""

from __future__ import annotations

import math

import pytest

from control_plane.platform.settings import load
from control_plane.queue.launches import per_tenant, prepare_limit

PLANNED_GPUS = 325
JOBS_PER_HOUR = 500 / 24


def share_that_waits(load: float, slots: int) -> float:
    """Erlang's C formula: the share of arrivals that find every slot taken."""
    busy = load**slots / math.factorial(slots) * slots / (slots - load)
    return busy / (sum(load**n / math.factorial(n) for n in range(slots)) + busy)


def test_at_the_planned_size_one_preparation_in_twenty_waits_for_a_slot() -> None:
    hours, slots = 1 / 6, prepare_limit(PLANNED_GPUS)
    assert slots / hours > 1.5 * JOBS_PER_HOUR
    assert share_that_waits(JOBS_PER_HOUR * hours, slots) < 0.05


def test_a_small_machine_is_not_overloaded_and_never_left_to_one_tenant() -> None:
    assert [prepare_limit(num_gpus) for num_gpus in (1, 8)] == [4, 4]
    assert [per_tenant(limit) for limit in (4, 1)] == [2, 1]


def test_the_operator_may_choose() -> None:
    assert prepare_limit(1, override=load({"FT_PREPARE_RUNS": "3"}).prepare_runs) == 3
    with pytest.raises(ValueError, match="FT_PREPARE_RUNS is 0; use 1 or more"):
        load({"FT_PREPARE_RUNS": "0"})
