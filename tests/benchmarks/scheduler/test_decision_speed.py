"""Queues whose decisions are timed: each is in the state that it is said to be in."""

from __future__ import annotations

import pytest

from benchmarks.scheduler.decision_speed import STATES, decision, snapshot
from engine.scheduler import Reservation


@pytest.mark.parametrize("state", [pytest.param(s, marks=() if s in ("half free", "blocked") else pytest.mark.slow) for s in STATES])
def test_a_decision_says_something_of_every_job(state: str) -> None:
    found = decision(state, 60, 6, times=2)
    assert found["start"] + found["wait"] == pytest.approx(60, abs=60 if state == "second round" else 0)
    assert found["cpu_p50_s"] <= found["cpu_p99_s"]
    assert bool(found["start"]) == (state in ("half free", "all free"))


def test_nobody_starts_where_all_is_held_and_the_second_round_knows_what_the_first_promised() -> None:
    later = snapshot("second round", 60, 6)
    promised = [w.promise for w in later.waiting if w.promise]
    assert promised and all(isinstance(p, Reservation) for p in promised)
    assert all(w.due_at is not None for w in later.waiting)


def test_nodes_hold_no_more_than_they_have() -> None:
    given = snapshot("half free", 10, 40)
    held = {n.name: 0 for n in given.pools[0].nodes}
    for job in given.running:
        for node, gpus in job.placement:
            held[node] += gpus
    assert max(held.values()) == 8
    assert sum(held.values()) == 160
