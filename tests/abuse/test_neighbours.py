"""A tenant that floods the platform costs the tenant beside it time, and never an answer.

Bounds are generous, for the machine also runs the flood; benchmarks/api/neighbours.py measures.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.abuse.neighbours import Place, neighbourhood, together
from tests.abuse.scenarios import SCENARIOS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

COUNT = 15
SLOWEST_S, TIMES_ALONE = 5.0, 25
MAX_MIB = {"api": 1500, "worker": 1500, "inference": 3000, "supervisor": 300, "postgres server": 500}


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="ft-abuse-", ignore_cleanup_errors=True) as home:
        Path(home).chmod(0o755)
        with neighbourhood(Path(home)) as found:
            yield found


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_flood_does_not_starve_the_neighbour(place: Place, name: str) -> None:
    found = together(place, name, count=COUNT)
    flood = found["flood"]
    assert flood["sent"] >= SCENARIOS[name].connections, f"that was no flood: {flood}"
    assert flood["faults"] == [], found
    bound_ms = max(1000 * SLOWEST_S, TIMES_ALONE * found["alone"]["max_ms"])
    assert found["beside"]["max_ms"] < bound_ms, found
    assert found["restarted"] == [], found
    assert found["idle_after"] and found["loud_works_again"], found
    assert {name: mib for name, mib in found["peak_mib"].items() if mib > MAX_MIB[name]} == {}, found
