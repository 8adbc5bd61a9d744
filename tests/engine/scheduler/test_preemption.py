"""Who gives way, to whom, and who is left alone."""

from __future__ import annotations

import dataclasses

import pytest

from engine.scheduler import Preempt, Reason, Rules, Running, Snapshot, Wait, Waiting, schedule
from engine.scheduler.pools import Pool
from tests.engine.scheduler.queue_cases import HOUR, NOW, decide, pool, running, stopped, waiting

GRAND = waiting("grand", tier="premium", gpus=2, expected=HOUR)


def long_runner(
    job_id: str, gpus: int = 2, *, node: str = "node-0", tier: str = "standard", saved_ago: float = 0.0, stops: int = 0
) -> Running:
    r = running(job_id, gpus, ends_in=20 * HOUR, ran=10 * HOUR, node=node, tier=tier, stops=stops)
    return dataclasses.replace(r, saved_at=NOW - saved_ago)


def test_a_blocked_premium_job_gets_the_gpus_of_the_victim_that_loses_least_work() -> None:
    dear = dataclasses.replace(long_runner("dear", saved_ago=3000), expected_end=NOW + 30 * HOUR)
    held = [dear, long_runner("cheap", saved_ago=10)]
    assert stopped([GRAND], held, pool(4), rules=Rules(slicing=False)) == [("cheap", "grand")], "slicing is for the others"
    decisions = schedule(Snapshot(pools=[pool(4)], waiting=[GRAND], running=held), now=NOW)
    stop, wait = decisions
    assert isinstance(stop, Preempt) and isinstance(wait, Wait)
    assert (stop.job_id, stop.for_job) == ("cheap", "grand")
    assert stop.lost_s == 2 * (180 + 0.1 * 10)
    assert "grand" not in stop.detail
    assert wait.reason is Reason.WAITING_FOR_PREEMPTED_WORKLOADS
    assert wait.promise is not None and wait.promise.start == NOW + 60
    assert "1 running job" in wait.detail


@pytest.mark.parametrize("of", [pool(4), pool(4, per_node=2)], ids=["on one node", "on two"])
def test_a_victim_that_would_be_due_a_moment_after_its_stop_is_not_due_yet(of: Pool) -> None:
    cheap, dear = long_runner("cheap", saved_ago=10), long_runner("dear", saved_ago=3000, node=of.nodes[-1].name)
    for left, first in ((0.5, "cheap"), (0.0, "dear")):
        held = [dataclasses.replace(cheap, due_at=cheap.queued_at + left), dear]
        assert stopped([GRAND], held, of) == [(first, "grand")]


def test_a_job_that_is_neither_due_nor_much_shorter_stops_nobody_of_a_lower_tier_unless_it_is_premium() -> None:
    held = [long_runner("a", tier="free")]
    assert stopped([waiting("j", gpus=2, expected=19 * HOUR)], held, pool(2)) == []
    assert stopped([waiting("j", gpus=2, expected=19 * HOUR, tier="premium")], held, pool(2)) == [("a", "j")]


def test_lower_tiers_give_way_first_and_equal_ones_never_to_premium() -> None:
    assert stopped([GRAND], [long_runner("a"), long_runner("b", tier="free", saved_ago=9000)], pool(4)) == [("b", "grand")]
    shorter = dataclasses.replace(GRAND, expected_s=19 * HOUR)
    assert stopped([shorter], [long_runner("a", tier="premium"), long_runner("b", tier="premium")], pool(4)) == []


@pytest.mark.parametrize(
    ("held", "why"),
    [
        pytest.param(running("a", 4, ends_in=HOUR, ran=9 * HOUR, node="node-0"), "past 80 % of its expected time", id="far along"),
        pytest.param(running("a", 4, ends_in=800, ran=10, node="node-0"), "less than a quarter of an hour is left", id="nearly done"),
        pytest.param(running("a", 4, ends_in=9 * HOUR, ran=600, node="node-0", stops=1), "it was just stopped", id="cooling down"),
        pytest.param(running("a", 4, ends_in=-60, ran=9 * HOUR, node="node-0"), "it ends any moment", id="overrunning"),
    ],
)
def test_nobody_is_stopped_who_is(held: Running, why: str) -> None:
    assert stopped([GRAND], [held], pool(4)) == [], why
    assert stopped([GRAND], [long_runner("a", 4)], pool(4)) == [("a", "grand")]


@pytest.mark.parametrize("share", [0.81, 0.85, 0.95, 0.96])
@pytest.mark.parametrize(
    "preemptor",
    [
        pytest.param(GRAND, id="premium"),
        pytest.param(waiting("short", gpus=2, expected=HOUR), id="much shorter"),
        pytest.param(dataclasses.replace(waiting("due", gpus=2, waited=9 * HOUR, expected=90 * HOUR), due_at=NOW - 60), id="due"),
    ],
)
def test_a_job_past_its_share_is_preempted_by_no_search(preemptor: Waiting, share: float) -> None:
    far = running("far", 2, ends_in=(1 - share) * 100 * HOUR, ran=share * 100 * HOUR, node="node-0")
    assert stopped([preemptor], [far], pool(2)) == []
    early = running("early", 2, ends_in=21 * HOUR, ran=79 * HOUR, node="node-0")
    assert stopped([preemptor], [early], pool(2)) == [("early", preemptor.job_id)]


def just(job: Running, **bounds: float) -> Running:
    """As far as its bound, in seconds: run, left, waited."""
    if "left" in bounds:
        job = dataclasses.replace(job, expected_end=NOW + bounds["left"], expected_s=2 * bounds["left"])
    if "ran" in bounds:
        job = dataclasses.replace(job, started_at=NOW - bounds["ran"])
    return job


@pytest.mark.parametrize("over", [0.0, -1.0], ids=["at the bound", "short of it"])
def test_a_bound_is_part_of_what_may_be_stopped(over: float) -> None:
    may = [("a", "grand")] if over == 0.0 else []
    sliced = [("a", "short")] if over == 0.0 else []
    assert stopped([GRAND], [dataclasses.replace(just(long_runner("a"), left=900 + over), expected_s=4500)], pool(2)) == may, (
        "900 s are left"
    )
    far = dataclasses.replace(just(long_runner("a"), left=5 * HOUR + over), expected_s=25 * HOUR)
    assert stopped([dataclasses.replace(GRAND, expected_s=5 * HOUR)], [far], pool(2)) == may, "a fifth of its expected time is left"
    assert stopped([GRAND], [just(long_runner("a", stops=1), ran=1800 + over)], pool(2)) == may, "it ran for the cool-down"
    short = waiting("short", gpus=2, expected=HOUR)
    assert stopped([short], [just(long_runner("a"), ran=900 + over)], pool(2)) == sliced, "it ran for a quarter of an hour"
    assert stopped([short], [just(long_runner("a", stops=3), ran=2 * HOUR + over)], pool(2)) == sliced, "doubled by each of three stops"
    assert stopped([short], [just(long_runner("a", stops=5000), ran=1024 * 900 + over)], pool(2)) == sliced, "it has run for ten days"
    assert stopped([GRAND], [just(long_runner("a", stops=3), ran=1800 + over)], pool(2)) == may, "not for premium jobs"
    assert stopped([short], [just(long_runner("a"), left=3 * HOUR + over)], pool(2)) == sliced, "it has three times as long to run"
    early = long_runner("a", tier="free")
    early = dataclasses.replace(early, due_at=early.queued_at + 181 + over)
    assert stopped([short], [early], pool(2)) == sliced, "more patience than a stop costs"


def test_wide_jobs_count_as_longer_when_others_take_their_place() -> None:
    held = [just(long_runner("a", 4), left=2 * HOUR)]
    assert stopped([waiting("j", gpus=1, expected=4 / 3 * HOUR)], held, pool(4)) == [("a", "j")], "twice as long for four times the GPUs"
    assert stopped([waiting("j", gpus=1, expected=4 / 3 * HOUR + 1)], held, pool(4)) == []
    assert stopped([waiting("j", gpus=4, expected=2 / 3 * HOUR)], held, pool(4)) == [("a", "j")]
    assert stopped([waiting("j", gpus=4, expected=2 / 3 * HOUR + 1)], held, pool(4)) == []


def test_a_stop_says_why_it_is_asked_for() -> None:
    due = dataclasses.replace(waiting("j", gpus=2, waited=9 * HOUR, expected=90 * HOUR), due_at=NOW - 60)
    for job, why in ((GRAND, "premium job for 2 GPUs takes precedence"), (due, "standard job for 2 GPUs is due"),
                     (waiting("j", gpus=2, expected=HOUR), "standard job for 2 GPUs is much shorter")):  # fmt: skip
        stop = schedule(Snapshot(pools=[pool(2)], waiting=[job], running=[long_runner("a")]), now=NOW)[0]
        assert isinstance(stop, Preempt) and why in stop.detail


def test_what_runs_that_cannot_be_asked_is_left_alone() -> None:
    one = long_runner("a")
    stopping = dataclasses.replace(one, stopping=True, stopping_since=NOW - 9)
    for left_alone in (dataclasses.replace(one, stoppable=False), stopping, dataclasses.replace(one, started_at=NOW)):
        assert stopped([GRAND], [left_alone], pool(2)) == []


def test_a_job_that_nobody_told_when_it_is_due_gives_way_last_and_to_premium_alone() -> None:
    untold = dataclasses.replace(long_runner("a", tier="free"), due_at=None)
    assert stopped([GRAND], [untold, long_runner("b", tier="free", saved_ago=9000)], pool(4)) == [("b", "grand")]
    assert stopped([GRAND], [untold], pool(2)) == [("a", "grand")]
    assert stopped([waiting("short", gpus=2, expected=HOUR)], [untold], pool(2)) == []
    waits = waiting("waits", gpus=2, expected=99 * HOUR, tier="free")
    assert stopped([waiting("short", gpus=2, expected=HOUR), waits], [untold], pool(2)) == [("a", "short")], "as patient as its tier"


@pytest.mark.parametrize("nodes", [("node-0", "node-0"), ("node-0", "node-1")])
def test_of_equal_ones_the_one_that_started_later_or_has_the_smaller_name_gives_way(nodes: tuple[str, str]) -> None:
    first, second = long_runner("a", 4, node=nodes[0]), long_runner("b", 4, node=nodes[1])
    of = pool(8, per_node=8 if nodes[0] == nodes[1] else 4)
    assert stopped([dataclasses.replace(GRAND, num_gpus=4)], [second, first], of) == [("a", "grand")]
    if nodes[0] == nodes[1]:
        later = dataclasses.replace(second, started_at=second.started_at + 600)
        assert stopped([dataclasses.replace(GRAND, num_gpus=4)], [first, later], of) == [("b", "grand")]


def test_of_more_nodes_than_are_looked_at_those_come_first_that_need_the_fewest_gpus_of_others() -> None:
    held = [long_runner("cheap", 4), long_runner("dear", 3, node="node-1", saved_ago=9000)]
    of, job = pool(8, per_node=4), dataclasses.replace(GRAND, num_gpus=2)
    assert stopped([job], held, of) == [("cheap", "grand")]
    assert stopped([job], held, of, rules=Rules(candidates=1)) == [("dear", "grand")]


@pytest.mark.parametrize(
    ("saved_at", "unsaved_s"),
    [(None, 10 * HOUR), (NOW - 20 * HOUR, 10 * HOUR), (NOW - HOUR, HOUR), (NOW, 0.0), (NOW + 60, 0.0)],
)
def test_a_stop_loses_a_share_of_what_this_attempt_did_since_its_last_checkpoint(saved_at: float | None, unsaved_s: float) -> None:
    held = dataclasses.replace(long_runner("a"), saved_at=saved_at)
    stop = schedule(Snapshot(pools=[pool(2)], waiting=[GRAND], running=[held]), now=NOW)[0]
    assert isinstance(stop, Preempt)
    assert stop.lost_s == pytest.approx(2 * (180 + 0.1 * unsaved_s))


def test_no_more_are_stopped_than_needed_and_those_on_one_node() -> None:
    held = [long_runner(f"{node}{i}", 1, node=f"node-{node}", saved_ago=60.0 * node) for node in (0, 1) for i in range(4)]
    stops = stopped([dataclasses.replace(GRAND, num_gpus=3)], held, pool(8, per_node=4))
    assert len(stops) == 3
    assert {victim[0] for victim, _ in stops} == {"0"}
    wide = stopped([dataclasses.replace(GRAND, num_gpus=8)], [*held[:4], long_runner("x", 2, node="node-1")], pool(8, per_node=4))
    assert {v for v, _ in wide} == {"00", "01", "02", "03", "x"}


def test_nobody_is_stopped_twice_for_one_job_and_nothing_takes_what_they_release() -> None:
    held = [dataclasses.replace(long_runner("a", 4), stopping=True, stopping_for="grand", stopping_since=NOW - 10)]
    first = decide([GRAND], [long_runner("a", 4)], pool(4))["grand"]
    assert isinstance(first, Wait)
    jobs = [dataclasses.replace(GRAND, promise=first.promise), waiting("small", gpus=4, expected=600)]
    assert stopped(jobs, held, pool(4)) == []
    meanwhile = decide(jobs, held, pool(4))["grand"]
    assert isinstance(meanwhile, Wait)
    assert (meanwhile.reason, meanwhile.detail[:13]) == (Reason.WAITING_FOR_PREEMPTED_WORKLOADS, "1 running job")
    after = decide(jobs, [], pool(4))
    assert not isinstance(after["grand"], Wait)
    assert isinstance(after["small"], Wait)


def test_a_promise_of_another_is_not_delayed_by_stops() -> None:
    early = decide(
        [waiting("mine", gpus=4, tier="free")],
        [
            long_runner("a", 4),
        ],
        pool(4),
        rules=Rules(slicing=False),
    )["mine"]
    assert isinstance(early, Wait) and early.promise is not None
    mine = waiting("mine", gpus=4, tier="free", promise=early.promise)
    assert stopped([mine, dataclasses.replace(GRAND, expected_s=21 * HOUR)], [long_runner("a", 4)], pool(4)) == []
    assert stopped([mine, GRAND], [long_runner("a", 4)], pool(4)) == [("a", "grand")]


def test_a_much_shorter_job_takes_the_place_of_the_one_that_has_longest_to_run() -> None:
    held = [running("a", 2, ends_in=20 * HOUR, ran=HOUR, node="node-0"), running("b", 2, ends_in=30 * HOUR, ran=HOUR, node="node-0")]
    assert stopped([waiting("short", gpus=2, expected=HOUR)], held, pool(4)) == [("b", "short")]
    assert stopped([waiting("longer", gpus=2, expected=11 * HOUR)], held, pool(4)) == []
    assert stopped([waiting("short", gpus=2, expected=HOUR)], held, pool(4), rules=Rules(slicing=False)) == []
    fresh = [dataclasses.replace(r, started_at=NOW - 600) for r in held]
    assert stopped([waiting("short", gpus=2, expected=HOUR)], fresh, pool(4)) == [], "each attempt runs for a quarter of an hour at least"
    upper = [dataclasses.replace(r, tier="premium") for r in held]
    assert stopped([waiting("short", gpus=2, expected=HOUR)], upper, pool(4)) == [], "never one of a higher tier"


def test_a_job_that_is_due_takes_the_place_of_one_that_is_not_however_long_it_is() -> None:
    due = dataclasses.replace(waiting("due", gpus=2, waited=9 * HOUR, expected=90 * HOUR), due_at=NOW - 60)
    other = running("a", 2, ends_in=20 * HOUR, ran=10 * HOUR, node="node-0")
    assert stopped([due], [other], pool(2)) == [("a", "due")]
    impatient = dataclasses.replace(other, due_at=NOW, waited_s=20 * HOUR)
    assert stopped([due], [impatient], pool(2)) == [], "it would be due at once itself"
