"""The replay of Kueue's generator: what it creates, and a small one through the whole loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.scheduler.kueue_emulated import emulate
from benchmarks.scheduler.kueue_replay import CLASSES, UNITS, cohort_pools, lower_bound_s, replay, workloads


def test_fifteen_thousand_workloads_are_created_as_kueue_creates_them() -> None:
    every = workloads()
    assert Counter(w.name for w in every) == {"small": 10_500, "medium": 3_000, "large": 1_500}
    assert len({w.job_id for w in every}) == 15_000
    assert max(w.created_s for w in every) == pytest.approx(49 * 1.2)
    assert [w.created_s for w in every] == sorted(w.created_s for w in every)


def test_a_cohort_is_a_pool_that_takes_its_own_workloads_alone() -> None:
    assert [p.num_gpus for p in cohort_pools()] == [UNITS] * 5
    assert len({p.takes for p in cohort_pools()}) == 5


def test_no_scheduler_is_quicker_than_a_cohorts_work_on_its_units() -> None:
    work = 6 * sum(kind.count * kind.units * kind.runs_s for kind in CLASSES.values())
    assert lower_bound_s(workloads()) == pytest.approx(work / UNITS) == pytest.approx(66.0)


@pytest.mark.slow
@pytest.mark.parametrize("run", [replay, emulate])
def test_every_workload_of_a_small_replay_is_started_once_and_ends(run: Callable[..., dict[str, Any]]) -> None:
    found = run(share=0.02, priorities=True)
    assert found["workloads"] == 30 * (7 + 2 + 1)
    assert (found["overbooked"], found["not_ended"], found["not_started_once"], found["still_held"]) == (0, 0, 0, 0)
    assert found["total_s"] > found["lower_bound_s"]
