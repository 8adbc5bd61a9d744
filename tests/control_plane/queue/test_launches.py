"""Limits of runs without a reservation: what the defaults carry, and what they leave to others; and how due runs are found."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from control_plane.platform.context import Platform
from control_plane.platform.settings import load
from control_plane.queue.launches import DUE, per_tenant, prepare_limit

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


@pytest.mark.parametrize("stage", DUE)
def test_due_runs_are_found_without_reading_every_job(platform: Platform, stage: str) -> None:
    """With 100,000 jobs, reading them all for each look took three quarters of the database's time."""
    query = DUE[stage]().compile(dialect=postgresql.dialect(), compile_kwargs={"literal_binds": True})
    with platform.engine.begin() as conn:
        conn.execute(sa.text("SET LOCAL enable_seqscan = off"))
        plan = conn.execute(sa.text(f"EXPLAIN (FORMAT JSON) {query}")).scalar_one()
    scans = list(_scans(plan[0]["Plan"], "jobs"))
    assert scans and all("Index Cond" in scan or "Recheck Cond" in scan for scan in scans), json.dumps(plan, indent=1)


def _scans(node: dict[str, Any], table: str) -> Iterator[dict[str, Any]]:
    if node.get("Relation Name") == table:
        yield node
    for below in node.get("Plans", ()):
        yield from _scans(below, table)
