"""Reservations: who gets one, who may start beside it, and when it moves."""

from __future__ import annotations

import dataclasses

import pytest

from engine.scheduler import (
    Evaluation,
    Reason,
    Reservation,
    Rules,
    Running,
    Snapshot,
    Start,
    Wait,
    Waiting,
    projected_start,
    schedule,
)
from tests.engine.scheduler.queue_cases import NOW, decide, pool, running, waiting

STILL = Rules(slicing=False)
"""Nobody is stopped, so that only promises decide."""


def test_the_first_blocked_job_is_promised_the_first_moment_at_which_its_gang_fits() -> None:
    held = [running("a", 2, ends_in=50, node="node-0"), running("b", 2, ends_in=100, node="node-0")]
    wait = decide([waiting("wide", gpus=3)], held, pool(4))["wide"]
    assert isinstance(wait, Wait)
    assert wait.promise == Reservation(start=NOW + 100, pool="p", placement=(("node-0", 3),), made_at=NOW)
    assert wait.expected_start == NOW + 100


def test_an_evaluation_that_no_pool_takes_says_so_and_has_no_place_in_the_queue() -> None:
    judged = dataclasses.replace(waiting("judged"), evaluation=Evaluation(id=None))
    wait = decide([judged, waiting("next")], [], pool(1, reserved=1))["judged"]
    assert isinstance(wait, Wait)
    assert (wait.reason, wait.position, wait.expected_start) == (Reason.EXCEEDS_MAX_QUOTA, 0, None)
    assert wait.detail.startswith("no pool takes a job of tier standard")


@pytest.mark.parametrize("names", [("soon", "late"), ("late", "soon")])
def test_a_promise_is_of_the_pool_that_is_free_first_whichever_is_written_down_first(names: tuple[str, str]) -> None:
    ends = {"soon": 100.0, "late": 900.0}
    held = [dataclasses.replace(running(name, 4, ends_in=ends[name], node="node-0"), pool=name) for name in names]
    queue = Snapshot(pools=[pool(4, name=name) for name in names], waiting=[waiting("j", gpus=4)], running=held)
    (wait,) = schedule(queue, now=NOW, rules=STILL)
    assert isinstance(wait, Wait)
    assert wait.promise == Reservation(start=NOW + 100, pool="soon", placement=(("node-0", 4),), made_at=NOW)


def test_what_ends_before_a_promise_or_uses_other_gpus_overtakes_it_and_nothing_else_does() -> None:
    held = [running("r", 2, ends_in=100, node="node-0")]
    jobs = [
        waiting("wide", gpus=3, expected=10),
        waiting("quick", expected=100),
        waiting("long", expected=500),
        waiting("beside", expected=400),
    ]
    decisions = decide(jobs, held, pool(4), rules=STILL)
    assert {j for j, d in decisions.items() if isinstance(d, Start)} == {"quick", "beside"}
    assert all(d.backfill for d in decisions.values() if isinstance(d, Start))
    late = decisions["long"]
    assert isinstance(late, Wait)
    assert late.reason is Reason.WAITING_FOR_QUOTA
    alone = decide([jobs[0], dataclasses.replace(jobs[2], num_gpus=2)], held, pool(4), rules=STILL)["long"]
    assert isinstance(alone, Wait)
    assert alone.reason is Reason.WAITING_BEHIND_HEAD
    assert alone.position == 2 and alone.ahead.jobs == {"standard": 1} and alone.ahead.num_gpus == 3


def test_a_blocked_evaluation_takes_no_gangs_reservation_and_has_one_itself() -> None:
    held = [running("r", 8, ends_in=100, node="node-0")]
    jobs = [
        dataclasses.replace(waiting("judged", expected=60), evaluation=Evaluation(id=None)),
        waiting("gang", gpus=8, expected=600),
        waiting("wide", gpus=8, expected=9000),
    ]
    decisions = decide(jobs, held, pool(8), rules=STILL)
    gang, wide = decisions["gang"], decisions["wide"]
    assert isinstance(gang, Wait) and gang.promise is not None
    assert gang.promise.start == NOW + 160, "after the evaluation, which comes first and has a reservation too"
    assert isinstance(wide, Wait) and wide.promise is None, "the gangs still share one"


def test_a_promise_is_kept_although_a_premium_job_comes_later() -> None:
    promise = Reservation(start=NOW + 100, pool="p", placement=(("node-0", 4),), made_at=NOW)
    jobs = [waiting("mine", gpus=4, tier="free", promise=promise), waiting("grand", gpus=2, tier="premium", expected=101)]
    held = [running("r", 2, ends_in=100, node="node-0", tier="premium")]
    decisions = decide(jobs, held, pool(4))
    mine, grand = decisions["mine"], decisions["grand"]
    assert isinstance(mine, Wait) and mine.promise == promise
    assert isinstance(grand, Wait)
    assert isinstance(decide([jobs[0], dataclasses.replace(jobs[1], expected_s=100.0)], held, pool(4))["grand"], Start)


def test_a_promise_gets_earlier_when_something_ends_before_it_was_expected() -> None:
    promise = Reservation(start=NOW + 900, pool="p", placement=(("node-0", 4),), made_at=NOW)
    held = [running("a", 4, ends_in=900, node="node-0"), running("b", 4, ends_in=300, node="node-1")]
    wait = decide([waiting("mine", gpus=4, promise=promise)], held, pool(8, per_node=4))["mine"]
    assert isinstance(wait, Wait) and wait.promise is not None
    assert (wait.promise.start, wait.promise.placement) == (NOW + 300, (("node-1", 4),))
    assert isinstance(decide([waiting("mine", gpus=4, promise=promise)], held[:1], pool(8, per_node=4))["mine"], Start)


def test_a_promise_gets_later_only_when_a_job_on_its_nodes_overruns() -> None:
    promise = Reservation(start=NOW - 5, pool="p", placement=(("node-0", 4),), made_at=NOW)
    job = waiting("mine", gpus=4, promise=promise)
    late = decide([job], [running("a", 4, ends_in=-5, node="node-0", ran=2000)], pool(4))["mine"]
    assert isinstance(late, Wait) and late.promise is not None
    assert late.promise.start == pytest.approx(NOW + 0.1 * 1995)
    assert isinstance(decide([job], [], pool(4))["mine"], Start)


@pytest.mark.parametrize(("ends_in", "after_s"), [(-0.5, 0.0), (-1.0, 0.0), (-1.5, 200.0), (0.5, 0.5)])
def test_a_job_overruns_a_second_after_it_was_to_end(ends_in: float, after_s: float) -> None:
    wait = decide([waiting("mine", gpus=4)], [running("a", 4, ends_in=ends_in, node="node-0", ran=2000 - ends_in)], pool(4))["mine"]
    assert isinstance(wait, Wait) and wait.promise is not None
    assert wait.promise.start == NOW + after_s


def test_a_promise_on_a_node_that_is_lost_or_of_an_earlier_stay_is_void() -> None:
    gone = Reservation(start=NOW + 10, pool="p", placement=(("node-9", 4),), made_at=NOW)
    held = [running("a", 4, ends_in=900, node="node-0")]
    wait = decide([waiting("mine", gpus=4, promise=gone)], held, pool(4))["mine"]
    assert isinstance(wait, Wait) and wait.promise is not None and wait.promise.start == NOW + 900
    stale = dataclasses.replace(
        waiting("mine", gpus=4, promise=dataclasses.replace(gone, placement=(("node-0", 4),), made_at=NOW - 10)), waiting_since=NOW - 5
    )
    again = decide([stale], held, pool(4))["mine"]
    assert isinstance(again, Wait) and again.promise is not None and again.promise.start == NOW + 900


@pytest.mark.parametrize("what", ["of an earlier stay", "for another width", "of a lost node", "of a pool that is gone"])
def test_a_void_promise_does_not_void_a_later_one(what: str) -> None:
    kept = Reservation(start=NOW + 900, pool="p", placement=(("node-0", 4),), made_at=NOW)
    void = {
        "of an earlier stay": dataclasses.replace(kept, start=NOW, made_at=NOW - 1),
        "for another width": dataclasses.replace(kept, start=NOW, placement=(("node-0", 3),)),
        "of a lost node": dataclasses.replace(kept, start=NOW, placement=(("node-9", 4),)),
        "of a pool that is gone": dataclasses.replace(kept, start=NOW, pool="gone"),
    }[what]
    jobs = [waiting("void", gpus=4, expected=60, promise=void), waiting("kept", gpus=4, promise=kept)]
    decisions = decide(jobs, [running("a", 4, ends_in=900, node="node-0")], pool(4), rules=STILL)
    found = {j: d.promise for j, d in decisions.items() if isinstance(d, Wait)}
    assert found == {"void": None, "kept": kept}, "which holds the only one of the pool and tier"


def test_promises_that_overlap_after_a_day_of_standstill_are_kept_one_after_the_other() -> None:
    past = [Reservation(start=NOW - 9000 + i, pool="p", placement=(("node-0", n),), made_at=NOW) for i, n in enumerate((4, 2, 3))]
    jobs = [waiting(f"j{i}", gpus=n, expected=100, promise=p) for i, (n, p) in enumerate(zip((4, 2, 3), past, strict=True))]
    decisions = decide(jobs, [], pool(4))
    assert [j for j, d in decisions.items() if isinstance(d, Start)] == ["j1"], "the least work first; the others are promised what follows"
    assert all(d.promise is not None and d.promise.start >= NOW + 100 for d in decisions.values() if isinstance(d, Wait))


def test_jobs_of_a_suspended_tenant_wait_behind_all_others_and_say_why() -> None:
    jobs = [waiting("theirs", tier="premium"), dataclasses.replace(waiting("mine"), tenant="other")]
    queue = Snapshot(pools=[pool(2)], waiting=jobs, running=[], suspended={"t": "unpaid"}, capped={"t": "at its cap"})
    start, wait = schedule(queue, now=NOW)
    assert isinstance(start, Start) and start.job_id == "mine"
    assert isinstance(wait, Wait)
    assert (wait.position, wait.reason, wait.detail, wait.expected_start) == (1, Reason.TENANT_SUSPENDED, "unpaid", None)
    capped = schedule(dataclasses.replace(queue, suspended={}), now=NOW)[-1]
    assert isinstance(capped, Wait) and capped.reason is Reason.WAITING_FOR_QUOTA


@pytest.mark.parametrize(
    ("ahead", "held", "starts_in"),
    [
        pytest.param([], [], 0.0, id="at once in an empty pool"),
        pytest.param([], [running("r", 2, ends_in=60)], 60.0, id="when the running one ends"),
        pytest.param([waiting("a", gpus=2, expected=100)], [running("r", 2, ends_in=60)], 160.0, id="behind a shorter one"),
        pytest.param([waiting("z", gpus=2, expected=9000)], [running("r", 2, ends_in=60)], 60.0, id="before a longer one"),
        pytest.param([waiting("a", gpus=2, expected=100, tier="free")], [], 0.0, id="before a lower tier"),
        pytest.param([waiting("a", gpus=9, expected=1)], [running("r", 2, ends_in=60)], 60.0, id="past one that never fits"),
    ],
)
def test_a_start_is_projected_over_the_whole_queue(ahead: list[Waiting], held: list[Running], starts_in: float) -> None:
    queue = Snapshot(pools=[pool(2)], waiting=[*ahead, waiting("mine", gpus=2, expected=300)], running=held)
    assert projected_start(queue, "mine", now=NOW) == NOW + starts_in


def test_a_start_is_projected_in_the_pool_that_is_up_although_the_first_one_is_down() -> None:
    down = dataclasses.replace(pool(4, name="down"), nodes=tuple(dataclasses.replace(n, ready=False) for n in pool(4).nodes))
    jobs = [waiting("a", gpus=2, expected=100), waiting("mine", gpus=2, expected=300)]
    queue = Snapshot(pools=[down, pool(2)], waiting=jobs, running=[running("r", 2, ends_in=60)])
    assert projected_start(queue, "mine", now=NOW) == NOW + 160
    wait = schedule(queue, now=NOW)[-1]
    assert isinstance(wait, Wait) and "pool down, 0 of 0 are free" in wait.detail, "the pool that it would rather have"


def test_no_start_is_projected_for_what_no_pool_can_hold_and_reserved_gpus_are_left_out() -> None:
    queue = Snapshot(pools=[pool(2)], waiting=[waiting("mine", gpus=3)], running=[running("r", 1)])
    assert projected_start(queue, "mine", now=NOW) is None
    beside = Snapshot(pools=[pool(2, reserved=1)], waiting=[waiting("a", expected=100), waiting("mine", expected=300)], running=[])
    assert projected_start(beside, "mine", now=NOW) == NOW + 100
    assert projected_start(beside, "nobody", now=NOW) is None
