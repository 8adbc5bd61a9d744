"""When jobs are due: whose wait counts for whom."""

from __future__ import annotations

import dataclasses
import random

from engine.scheduler import Rules, Running, Snapshot, Start, Wait, Waiting, schedule
from engine.scheduler.order import factors, order
from engine.scheduler.pools import Pool
from tests.engine.scheduler.queue_cases import HOUR, NOW, pool, running, waiting

CALM = Rules(slicing=False)


def remaining_wait(queue: Snapshot) -> dict[str, float]:
    """Hours from the submission until each waiting job is due."""
    queued = {w.job_id: w.queued_at for w in queue.waiting}
    waits = [d for d in schedule(queue, now=NOW, rules=CALM) if isinstance(d, Wait) and d.due_at is not None]
    return {d.job_id: round(((d.due_at or 0.0) - queued[d.job_id]) / HOUR, 6) for d in waits}


def two_pools() -> tuple[list[Pool], list[Running]]:
    """A pool for adapters that is full for 180 h, and one for all parameters that is free in two."""
    adapters = dataclasses.replace(pool(4), name="adapters", takes=frozenset({"lora"}))
    whole = dataclasses.replace(pool(4), name="whole", takes=frozenset({"full"}))
    held = [
        dataclasses.replace(running("a", 4, ends_in=180 * HOUR), pool="adapters"),
        dataclasses.replace(running("b", 4, ends_in=2 * HOUR), pool="whole"),
    ]
    return [adapters, whole], held


def test_patience_is_that_of_the_pools_that_a_job_waits_for() -> None:
    pools, held = two_pools()
    adapters = [waiting(f"a{i}", gpus=4, waited=60.0 - i, expected=HOUR) for i in range(10)]
    newest = dataclasses.replace(waiting("newest", gpus=4, expected=HOUR), job_class="full")
    found = remaining_wait(Snapshot(pools=pools, waiting=[*adapters, newest], running=held))
    assert found == {**{f"a{i}": 189.0 for i in range(10)}, "newest": 2.0}
    other = dataclasses.replace(newest, queued_at=NOW - 99, waiting_since=NOW - 99)
    assert remaining_wait(Snapshot(pools=pools, waiting=[*adapters, other], running=held))["newest"] == 2.0, "whoever comes last"


def test_of_several_that_join_at_once_the_one_that_would_wait_longest_tells() -> None:
    narrow = dataclasses.replace(pool(4), name="narrow")
    held = [dataclasses.replace(running("a", 4, ends_in=50 * HOUR), pool="narrow")]
    jobs = [waiting("first", gpus=4, waited=2.0), waiting("never", gpus=4, tier="premium", waited=1.0)]
    found = remaining_wait(Snapshot(pools=[narrow], waiting=jobs, running=held))
    assert found == {"never": 50.0, "first": 50.0 + round(600 / HOUR, 6)}


def test_what_barred_tenants_would_take_is_nobodys_wait_and_their_own_clock_stays() -> None:
    held = [running("r", 4, ends_in=3 * HOUR, node="node-0")]
    backlog = [dataclasses.replace(waiting(f"s{i}", gpus=4, waited=HOUR, expected=90 * HOUR), tenant="barred") for i in range(20)]
    told = [dataclasses.replace(b, due_at=NOW + 500 * HOUR) for b in backlog[:10]]
    back = dataclasses.replace(waiting("back", gpus=4, waited=60), waited_s=60.0, due_at=NOW + HOUR)
    jobs = [waiting("new", gpus=4), back, *told, *backlog[10:]]
    everybody, barred = Snapshot(pools=[pool(4)], waiting=jobs, running=held), {"barred": "is not let in"}
    for queue in (dataclasses.replace(everybody, suspended=barred), dataclasses.replace(everybody, capped=barred)):
        dues = {d.job_id: d.due_at for d in schedule(queue, now=NOW, rules=CALM) if isinstance(d, Wait)}
        assert dues["new"] == NOW + 3 * HOUR + 600
        assert dues["back"] == back.queued_at + 3 * HOUR + 600
        assert dues["s0"] == NOW + 500 * HOUR
        assert dues["s10"] is None


def test_who_comes_back_has_the_patience_of_those_that_wait_and_who_is_new_that_of_the_present_load() -> None:
    held = [running("r", 4, ends_in=3 * HOUR, node="node-0")]
    stormy = dataclasses.replace(waiting("stormy", gpus=4, waited=HOUR), due_at=NOW + 89 * HOUR)
    old = dataclasses.replace(waiting("old", gpus=4, waited=5 * HOUR), due_at=NOW)
    jobs = [
        stormy,
        dataclasses.replace(old, job_id="first stay"),
        dataclasses.replace(old, job_id="stopped", preemptions=1),
        dataclasses.replace(old, job_id="waited", waited_s=60.0),
    ]
    found = remaining_wait(Snapshot(pools=[pool(4)], waiting=jobs, running=held))
    assert found == {"stormy": 90.0, "first stay": 5.0, "stopped": 90.0, "waited": 90.0}
    new = remaining_wait(Snapshot(pools=[pool(4)], waiting=[stormy, waiting("new", gpus=4)], running=held))
    assert new["new"] == round((3 * HOUR + 600) / HOUR, 6), "after the running one and the one before it"


def test_a_job_for_a_pool_that_is_down_is_due_no_sooner_than_its_tier_promises() -> None:
    down = pool(4)
    down = dataclasses.replace(down, nodes=tuple(dataclasses.replace(n, ready=False) for n in down.nodes))
    assert remaining_wait(Snapshot(pools=[down], waiting=[waiting("j")], running=[])) == {"j": 1.0}


def test_the_time_in_which_a_tenant_was_not_let_in_is_no_waiting() -> None:
    """A backlog that comes back from a suspension of a week is not overdue for a week."""
    held = [running("r", 1, ends_in=2 * HOUR)]
    back = dataclasses.replace(waiting("back", waited=7 * 24 * HOUR, expected=9 * HOUR), tenant="b", due_at=NOW - 160 * HOUR)
    patient = dataclasses.replace(waiting("patient", waited=3 * HOUR, expected=9 * HOUR), due_at=NOW - HOUR)
    assert [j.job_id for j in order([patient, back], now=NOW)] == ["back", "patient"]
    let_in = dataclasses.replace(back, barred_until=NOW - 60)
    assert (let_in.waited(NOW), dataclasses.replace(let_in, waited_s=HOUR).waited(NOW)) == (60.0, HOUR + 60.0)
    assert dataclasses.replace(let_in, barred_until=NOW + 5).waited(NOW) == 0.0, "another clock may run ahead"
    assert [j.job_id for j in order([let_in, patient], now=NOW)] == ["patient", "back"]
    fresh = dataclasses.replace(let_in, due_at=None)
    (start, wait) = schedule(Snapshot(pools=[pool(2)], waiting=[fresh, patient], running=held), now=NOW, rules=CALM)
    assert isinstance(start, Start) and isinstance(wait, Wait)
    assert (start.job_id, wait.job_id) == ("patient", "back")
    assert (wait.due_at or 0.0) - back.queued_at >= HOUR


def test_fair_shares_do_not_depend_on_the_order_in_which_use_is_told() -> None:
    rng = random.Random(1)
    used = {f"t{i}": rng.uniform(0, 1e6) + 0.1 for i in range(60)}
    mine: list[Waiting] = [waiting("a")]
    found = set()
    for _ in range(30):
        told = list(used.items())
        rng.shuffle(told)
        found.add(tuple(sorted(factors(Snapshot(pools=[], waiting=mine, running=[], used=dict(told))).items())))
    assert len(found) == 1
