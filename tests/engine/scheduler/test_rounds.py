"""Round after round: who holds the few promises, what late stops and estimates do to them, and who is looked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.scheduler import Preempt, Reservation, Rules, Running, Snapshot, Start, Wait, Waiting, schedule
from engine.scheduler.pools import Pool
from tests.engine.scheduler.queue_cases import HOUR, NOW, decide, pool, running, stopped, waiting

STILL = Rules(slicing=False)
NODE = (("node-0", 4),)


def promised(start: float, *, where: str = "p", placement: tuple[tuple[str, int], ...] = NODE) -> Reservation:
    return Reservation(start=start, pool=where, placement=placement, made_at=NOW)


def promise_of(decisions: dict[str, Start | Wait], job_id: str) -> Reservation | None:
    wait = decisions[job_id]
    assert isinstance(wait, Wait)
    return wait.promise


def of_two(jobs: Sequence[Waiting], held: Sequence[Running] = (), *, pools: Sequence[Pool]) -> dict[str, Start | Wait]:
    decisions = schedule(Snapshot(pools=pools, waiting=jobs, running=held), now=NOW, rules=STILL)
    return {d.job_id: d for d in decisions if not isinstance(d, Preempt)}


# The few promises of a pool and tier


@pytest.mark.parametrize("order", [(100.0, 2000.0), (3000.0, 300.0)])
def test_a_job_that_starts_leaves_its_promise_to_the_next_blocked_one_in_the_same_round(order: tuple[float, float]) -> None:
    """Whichever of the two is first: `old` starts now, as it was promised, and nothing long takes the node that `wide` is to have."""
    old = waiting("old", gpus=4, expected=order[0], promise=promised(NOW))
    wide = waiting("wide", gpus=8, expected=order[1])
    long = waiting("long", gpus=4, expected=9 * HOUR)
    decisions = decide([old, wide, long], [running("r", 4, ends_in=800, node="node-1")], pool(12, per_node=4), rules=STILL)
    assert isinstance(decisions["old"], Start)
    promise = promise_of(decisions, "wide")
    assert promise is not None and promise.start <= NOW + 800
    assert isinstance(decisions["long"], Wait)


def test_after_a_round_the_next_head_holds_a_promise_and_nothing_long_takes_its_node() -> None:
    old = waiting("old", gpus=4, expected=100, promise=promised(NOW))
    wide = waiting("wide", gpus=8, expected=2000)
    long = waiting("long", gpus=4, expected=9 * HOUR)
    decisions = decide([old, wide, long], [], pool(8, per_node=4), rules=STILL)
    promise = promise_of(decisions, "wide")
    assert isinstance(decisions["old"], Start)
    assert promise is not None and promise.start == NOW + 100
    assert isinstance(decisions["long"], Wait)


def test_a_promise_that_stops_made_leaves_the_one_of_its_pool_and_tier_to_the_next_job() -> None:
    held = [
        replace(running("a", 4, ends_in=20 * HOUR, ran=HOUR, node="node-0"), stopping=True, stopping_for="mine", stopping_since=NOW - 10),
        running("b", 4, ends_in=5 * HOUR, node="node-1"),
    ]
    mine = waiting("mine", gpus=4, promise=promised(NOW + 50))
    decisions = decide([mine, waiting("next", gpus=4, expected=900)], held, pool(8, per_node=4), rules=STILL)
    assert promise_of(decisions, "mine") == mine.promise
    assert promise_of(decisions, "next") is not None
    unasked = [replace(held[0], stopping=False, stopping_for=None, stopping_since=None, expected_end=NOW + 50), held[1]]
    assert promise_of(decide([mine, waiting("next", gpus=4, expected=900)], unasked, pool(8, per_node=4), rules=STILL), "next") is None


def test_what_a_job_leaves_that_starts_elsewhere_than_promised_goes_to_one_before_it_in_the_same_round() -> None:
    old = waiting("old", expected=600, promise=promised(NOW, placement=(("node-0", 1),)))
    held = [running("r", 3, ends_in=9 * HOUR, node="node-1")]
    decisions = decide([waiting("first", gpus=4, expected=60), old], held, pool(8, per_node=4), rules=STILL)
    starts = {j: d.placement for j, d in decisions.items() if isinstance(d, Start)}
    assert starts == {"first": (("node-0", 4),), "old": (("node-1", 1),)}


def test_a_job_for_which_others_are_stopped_leaves_its_promise_to_one_before_it_in_the_same_round() -> None:
    held = [
        running("a", 4, ends_in=20 * HOUR, ran=10 * HOUR, node="node-0"),
        running("b", 4, ends_in=5 * HOUR, ran=HOUR, tier="premium", node="node-1"),
    ]
    head = waiting("head", gpus=4, expected=HOUR, promise=promised(NOW + 5 * HOUR, placement=(("node-1", 4),)))
    jobs = [waiting("first", gpus=8, expected=60), head]
    assert stopped(jobs, held, pool(8, per_node=4)) == [("a", "head")]
    decisions = decide(jobs, held, pool(8, per_node=4))
    first, after = promise_of(decisions, "first"), promise_of(decisions, "head")
    assert after is not None and after.start == NOW + 60
    assert first is not None, "the one promise of the pool and tier is free again"


def test_promises_that_move_to_another_pool_do_not_pile_up_there() -> None:
    small, large = pool(4, name="small"), pool(4, name="large")
    held = [
        replace(running("s", 4, ends_in=100, node="node-0"), pool="small"),
        replace(running("l", 4, ends_in=900, node="node-0"), pool="large"),
    ]
    jobs = [
        waiting("a", gpus=4, expected=60, promise=promised(NOW + 100, where="small")),
        waiting("b", gpus=4, expected=70, promise=promised(NOW + 900, where="large")),
    ]
    decisions = of_two(jobs, held, pools=[small, large])
    assert [p and p.pool for p in (promise_of(decisions, "a"), promise_of(decisions, "b"))] == ["small", "large"]


def test_what_a_moved_promise_leaves_is_taken_only_if_it_stays_where_it_moved_to() -> None:
    """`wide` is promised node-2 instead of node-0, sooner, and a long job takes a GPU of node-0. `quick` starts elsewhere than was
    promised, so that the queue is walked again."""
    wide = waiting("wide", gpus=8, expected=9 * HOUR, promise=promised(NOW + 900, placement=(("node-0", 4), ("node-1", 4))))
    quick = waiting("quick", gpus=1, expected=5000, promise=promised(NOW + 300, placement=(("node-3", 1),)))
    ends = {"a": (1, 900.0), "b": (4, 300.0), "c": (4, 300.0), "d": (4, 300.0)}
    held = [running(name, n, ends_in=end, node=f"node-{i}") for i, (name, (n, end)) in enumerate(ends.items())]
    decisions = decide([quick, wide, waiting("long", gpus=1, expected=20 * HOUR)], held, pool(16, per_node=4, widest=8), rules=STILL)
    assert isinstance(decisions["quick"], Start) and isinstance(decisions["long"], Start)
    promise = promise_of(decisions, "wide")
    assert promise is not None
    assert (promise.start, promise.placement) == (NOW + 300, (("node-1", 4), ("node-2", 4)))


def test_rounding_of_a_promised_moment_holds_up_nobody() -> None:
    """One ends where the next begins: the first starts although its end now lies a rounding error behind the other's start."""
    first = waiting("first", gpus=4, expected=1000, promise=promised(NOW - 1e-6))
    second = waiting("second", gpus=4, tier="free", expected=9 * HOUR, promise=promised(NOW + 1000 - 1e-6))
    decisions = decide([first, second], [], pool(4), rules=STILL)
    assert isinstance(decisions["first"], Start)
    assert promise_of(decisions, "second") == second.promise


def test_only_a_start_beside_a_promise_in_the_same_pool_of_an_earlier_job_is_a_backfill() -> None:
    held = [replace(running("s", 4, ends_in=900, node="node-0"), pool="small")]
    blocked = replace(waiting("blocked", gpus=4, expected=60), tier="standard")
    pools = [pool(4, name="small"), replace(pool(2, name="large"), max_gpus_per_job=2)]
    decisions = of_two([blocked, waiting("elsewhere", gpus=1, expected=600)], held, pools=pools)
    start = decisions["elsewhere"]
    assert isinstance(start, Start) and start.pool == "large" and not start.backfill
    before = decide([waiting("short", expected=1), waiting("wide", gpus=3, promise=promised(NOW + 60, placement=(("node-0", 3),)))],
                    [running("r", 2, ends_in=60, node="node-0")], pool(4), rules=STILL)["short"]  # fmt: skip
    assert isinstance(before, Start) and not before.backfill, "it was first anyway"


# Stops that come late, or not at all

GRAND = waiting("grand", tier="premium", gpus=2, expected=HOUR)


def late_release(since: float) -> Running:
    r = running("a", 4, ends_in=20 * HOUR, ran=10 * HOUR, node="node-0")
    return replace(r, stopping=True, stopping_for="grand", stopping_since=NOW - since)


@pytest.mark.parametrize("since", [61.5, 90.0, 600.0])
def test_a_stop_that_takes_longer_than_the_handshake_moves_the_promise_by_another_one_not_by_hours(since: float) -> None:
    grand = replace(GRAND, promise=promised(NOW - since + 60, placement=(("node-0", 2),)))
    decisions = decide([grand, waiting("long", gpus=2, expected=HOUR)], [late_release(since)], pool(4), rules=STILL)
    promise = promise_of(decisions, "grand")
    assert promise is not None and promise.start == NOW + 60
    assert stopped([grand], [late_release(since), running("b", 4, ends_in=9 * HOUR, ran=HOUR, node="node-1")], pool(8, per_node=4)) == []
    released = decide([replace(grand, promise=promise), waiting("long", gpus=4, expected=HOUR)], [], pool(4), rules=STILL)
    assert isinstance(released["grand"], Start) and isinstance(released["long"], Wait)


def test_where_the_time_of_the_request_is_not_known_a_job_that_stops_ends_when_its_gpus_are_promised() -> None:
    stopping = replace(late_release(0), stopping_since=None)
    for start, ends in ((NOW + 20, NOW + 20), (NOW + 30, NOW + 30), (NOW - 20, NOW)):
        grand = replace(GRAND, promise=promised(start, placement=(("node-0", 2),)))
        wait = decide([grand], [stopping], pool(4), rules=STILL)["grand"]
        assert isinstance(wait, Wait)
        assert wait.expected_start == ends
    unknown = decide([GRAND], [replace(stopping, stopping_for=None)], pool(4), rules=STILL)["grand"]
    assert isinstance(unknown, Wait) and unknown.expected_start == NOW + 60, "a handshake from now"


def test_while_somebody_stops_for_a_job_no_others_are_looked_for_until_the_handshake_is_over() -> None:
    grand = replace(GRAND, num_gpus=4, promise=promised(NOW + 50))
    long = running("a", 2, ends_in=20 * HOUR, ran=HOUR, node="node-0")
    asked, late = (replace(long, stopping=True, stopping_for="grand", stopping_since=NOW - since) for since in (10, 61.5))
    missed = running("b", 2, ends_in=20 * HOUR, ran=HOUR, node="node-0")
    assert stopped([grand], [asked, missed], pool(4)) == []
    assert stopped([grand], [late, missed], pool(4)) == [("b", "grand")]


def test_a_job_that_others_stop_for_is_promised_what_they_release_however_many_hold_promises() -> None:
    asked = replace(
        running("a", 4, ends_in=20 * HOUR, ran=HOUR, node="node-0"), stopping=True, stopping_for="grand", stopping_since=NOW - 10
    )
    first = waiting(
        "first", tier="premium", gpus=8, expected=600, promise=promised(NOW + 5 * HOUR, placement=(("node-0", 4), ("node-1", 4)))
    )
    held = [asked, running("b", 4, ends_in=5 * HOUR, tier="premium", node="node-1")]
    decisions = decide([first, replace(GRAND, num_gpus=4)], held, pool(8, per_node=4), rules=STILL)
    promise = promise_of(decisions, "grand")
    assert promise is not None and (promise.start, promise.placement) == (NOW + 50, (("node-0", 4),))


def test_a_promise_that_was_missed_is_not_waited_for() -> None:
    """One whose end is always now: the promise stays where it was, and passes."""
    stuck = running("stuck", 2, ends_in=0.0, ran=HOUR, node="node-0")
    other = running("other", 2, ends_in=9 * HOUR, ran=HOUR, node="node-0")
    for ago in (5, 61):
        just = replace(GRAND, promise=promised(NOW - ago, placement=(("node-0", 2),)))
        assert stopped([just], [stuck, other], pool(4)) == [], "it may end any moment"
        wait = decide([just], [stuck, other], pool(4))["grand"]
        assert isinstance(wait, Wait) and wait.expected_start == NOW, "not in the past, as its reservation is"
    gone = replace(GRAND, promise=promised(NOW - 90, placement=(("node-0", 2),)))
    for ends_in in (0.0, 1.0):
        stuck = replace(stuck, expected_end=NOW + ends_in)
        assert stopped([gone], [stuck, other], pool(4)) == [("other", "grand")]


def test_a_job_that_only_waits_for_a_release_leaves_the_promise_of_its_pool_and_tier_to_the_next() -> None:
    stuck = running("stuck", 2, ends_in=0.0, ran=HOUR, tier="premium", node="node-0")
    held = [stuck, running("b", 2, ends_in=HOUR, tier="premium", node="node-0")]
    mine = waiting("mine", gpus=2, expected=60, promise=promised(NOW, placement=(("node-0", 2),)))
    decisions = decide([mine, waiting("next", gpus=4)], held, pool(4), rules=STILL)
    assert promise_of(decisions, "mine") == mine.promise
    assert promise_of(decisions, "next") is not None


def test_a_short_job_that_overruns_is_not_waited_for_round_after_round() -> None:
    over = running("over", 2, ends_in=-10, ran=300, node="node-0")
    other = running("other", 2, ends_in=9 * HOUR, ran=HOUR, node="node-0")
    assert stopped([GRAND], [over, other], pool(4)) == [("other", "grand")]


# Who is looked for


def test_jobs_that_only_those_could_help_who_are_stopped_for_another_leave_the_search_to_others() -> None:
    other = replace(pool(4, name="other"), takes=frozenset({"full"}))
    victim = running("a", 4, ends_in=20 * HOUR, ran=HOUR, node="node-0")
    held = [victim, replace(victim, job_id="b", pool="other")]
    first, second = (waiting(name, gpus=n, tier="premium", expected=s) for name, n, s in (("first", 4, 60.0), ("second", 3, HOUR)))
    last = replace(waiting("last", gpus=4, tier="premium", expected=2 * HOUR), job_class="full")
    queue = Snapshot(pools=[replace(pool(4), takes=frozenset({"lora"})), other], waiting=[first, second, last], running=held)
    stops = [(d.job_id, d.for_job) for d in schedule(queue, now=NOW, rules=Rules(preemptors=2)) if isinstance(d, Preempt)]
    assert stops == [("a", "first"), ("b", "last")]


def test_in_a_round_gpus_are_looked_for_a_bounded_number_of_times_and_once_for_a_job_by_both_rules() -> None:
    held = [running("upper", 2, ends_in=90 * HOUR, ran=HOUR, tier="premium", node="node-0")]
    held += [running("low", 2, ends_in=90 * HOUR, ran=HOUR, node="node-0")]
    for tier in ("premium", "standard"):
        jobs = [waiting("hopeless", gpus=3, tier=tier, expected=60), waiting("mine", gpus=2, tier=tier, expected=HOUR)]
        assert stopped(jobs, held, pool(4), rules=Rules(preemptors=1)) == []
        assert stopped(jobs, held, pool(4), rules=Rules(preemptors=2)) == [("low", "mine")]


@pytest.mark.parametrize("apart_s", [1.0, 0.0])
def test_jobs_for_which_nothing_is_found_leave_the_search_to_others(apart_s: float) -> None:
    """Two dozen premium gangs that no stop helps, all before the one that it does."""
    held = [running(f"p{i}", 3, ends_in=90 * HOUR, ran=HOUR, tier="premium", node=f"node-{i}") for i in range(3)]
    held += [running("low", 1, ends_in=90 * HOUR, ran=HOUR, node="node-2")]
    hopeless = [waiting(f"h{i:02}", gpus=4, tier="premium", expected=100.0 + i * apart_s) for i in range(24)]
    mine = waiting("mine", gpus=1, tier="premium", expected=9 * HOUR)
    full = [running(f"f{i}", 1, ends_in=90 * HOUR, ran=HOUR, tier="premium", node=f"node-{i}") for i in range(2)]
    assert stopped([*hopeless, mine], [*held, *full], pool(12, per_node=4)) == [("low", "mine")]


def test_in_pools_of_whole_nodes_small_jobs_make_room_for_a_wide_one() -> None:
    whole = replace(pool(8, per_node=4), packing="whole_node")
    held = [running(f"s{i}", 1, ends_in=90 * HOUR, ran=HOUR, node=f"node-{i}") for i in range(2)]
    assert sorted(stopped([replace(GRAND, num_gpus=8)], held, whole)) == [("s0", "grand"), ("s1", "grand")]


def test_of_the_last_node_no_more_is_emptied_than_is_left_of_the_gang() -> None:
    held = [running(f"{node}{i}", 1, ends_in=90 * HOUR, ran=HOUR, node=f"node-{node}") for node in (0, 1) for i in range(4)]
    stops = stopped([replace(GRAND, num_gpus=6)], held, pool(8, per_node=4))
    assert len(stops) == 6


def test_premium_jobs_give_way_to_nobody_however_much_shorter_or_due_the_other_is() -> None:
    held = [running("a", 2, ends_in=90 * HOUR, ran=9 * HOUR, tier="premium", node="node-0")]
    due = replace(GRAND, queued_at=NOW - 9 * HOUR, due_at=NOW - HOUR)
    assert stopped([replace(GRAND, expected_s=60.0)], held, pool(2)) == []
    assert stopped([due], held, pool(2)) == []
