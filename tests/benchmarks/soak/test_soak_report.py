"""The soak's figures: intervals, the table of recoveries, and the page."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.soak import report


def fault(target: str, at: float, recovered_s: float | None, *, hit: bool = True) -> dict[str, Any]:
    log = {"tracebacks": 1, "outage_lines": 2}
    return {"target": target, "kind": "kill", "at": at, "detected_s": 0.2, "recovered_s": recovered_s, "hit": hit, "log": log}


@pytest.mark.parametrize(
    ("hits", "number", "low", "high"),
    [(0, 0, 0.0, 1.0), (0, 10, 0.0, 0.278), (5, 10, 0.237, 0.763), (200, 200, 0.981, 1.0)],
)  # https://en.wikipedia.org/wiki/Binomial_proportion_confidence_interval#Wilson_score_interval
def test_intervals_are_those_of_wilson(hits: int, number: int, low: float, high: float) -> None:
    assert report.wilson(hits, number) == pytest.approx((low, high), abs=0.001)


def test_work_that_was_lost_counts_for_the_fault_before_it() -> None:
    faults = [fault("api", 10.0, 4.0), fault("trainer", 20.0, 6.0), fault("api", 30.0, None, hit=False)]
    api, trainer = report.table(faults, [(5.0, 99.0), (21.0, 3.5), (31.0, 2.0)])
    assert (api["count"], api["hits"], api["recovered"], api["recovered_s_max"], api["lost_gpu_s_max"]) == (2, 1, 1, 4.0, 2.0)
    assert (trainer["lost_gpu_s_p50"], trainer["tracebacks"]) == (3.5, 1)
    assert report.rates([*faults, fault("api", 40.0, 0.0)])["recovered within 60 s"]["count"] == 3


def test_the_page_names_every_breach_and_what_was_left_out() -> None:
    faults = [fault("api", 10.0, None)]
    work = {
        "jobs": 1, "attempts": 2, "outcomes": {"succeeded": 1}, "bad_uploads": 1, "adapters_compared": 1,
        "of_jobs_with_several_attempts": 1, "lost_gpu_s": 1.5,
    }  # fmt: skip
    result = {
        "options": "--seed 3", "seed": 3, "minutes": 5.0, "machine": {"cores": 2, "load_1_min": 1.0}, "work": work,
        "rates": report.rates(faults), "faults": report.table(faults, []), "left_out": ["full disk: needs root"], "skipped": 0,
        "trends": {}, "breaches": ["api, kill: not back in 400 s"],
    }  # fmt: skip
    page = report.as_markdown(result)
    assert "| api | kill | 1 | 1 | 0.2 | 0.2 | - | - | 0 | 0 | 1 | 2 |" in page
    assert "Left out: full disk: needs root." in page
    assert page.endswith("Breaches: 1.\n- api, kill: not back in 400 s\n")
