"""What holds for every queue: GPUs are conserved, promises are kept, nobody starves, equal snapshots get equal decisions."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scheduler.simulation import synthetic
from engine.scheduler import DEFAULT_RULES, Preempt, Reservation, Running, Snapshot, Start, Wait, Waiting, schedule
from engine.scheduler.pools import Pool, equal_nodes
from engine.scheduler.simulation.cluster_simulation import Simulation
from tests.engine.scheduler.queue_cases import HOUR, NOW, Job, play, pool

TIERS = st.sampled_from(["premium", "standard", "standard", "free"])
JOBS = st.lists(
    st.builds(
        Job,
        submitted=st.floats(0, 40 * HOUR).map(lambda s: NOW + round(s)),
        num_gpus=st.sampled_from([1, 1, 2, 3, 4, 4, 8]),
        seconds=st.sampled_from([60.0, 900.0, HOUR, 4 * HOUR, 20 * HOUR, 90 * HOUR]),
        tier=TIERS,
    ),
    min_size=1,
    max_size=40,
)
CLUSTERS = st.sampled_from(
    [
        pool(12, per_node=4, widest=8),
        pool(16, per_node=4, fabrics_of=2, reserved=4, widest=8),
        replace(pool(16, per_node=4, widest=8), packing="whole_node"),
        pool(10),
    ]
)


@settings(max_examples=40, deadline=None)
@given(JOBS, CLUSTERS)
def test_every_job_ends_gangs_are_whole_and_no_promise_is_broken_by_what_comes_later(jobs: list[Job], of: Pool) -> None:
    """The player counts GPUs by node, tier and fabric after every round."""
    played = play(jobs, [of])
    assert len(played.ended) == len(jobs)
    assert played.broken == []


OVERLAPPING = [
    replace(pool(8, per_node=4, name="small", widest=4)),
    replace(pool(8, per_node=4, name="large"), reserved_gpus=4),
    replace(pool(8, per_node=4, name="whole"), packing="whole_node"),
]


@settings(max_examples=25, deadline=None)
@given(JOBS, st.integers(1, 3), st.sampled_from([30.0, 90.0, 400.0]), st.sampled_from([0, 2, 3]))
def test_every_job_ends_where_pools_overlap_stops_are_late_and_some_are_never_asked_for(
    jobs: list[Job], num_pools: int, release_s: float, drop_every: int
) -> None:
    played = play(jobs, OVERLAPPING[-num_pools:], release_s=release_s, drop_every=drop_every)
    assert len(played.ended) == len(jobs)
    assert release_s > 60.0 or drop_every or played.broken == []


def test_in_three_days_of_the_planned_mix_no_promise_is_broken_and_no_premium_job_is_stopped() -> None:
    """With this seed, promises move while others start in the same round, and what they leave is taken."""
    jobs = synthetic.planned_mix(15, days=3.0, premium="share")
    outcome = Simulation(jobs, [pool(256, per_node=8)], lambda snapshot, now: schedule(snapshot, now=now), seed=15).run()
    assert outcome.broken == []
    assert [r.job.job_id for r in outcome.records if r.job.tier == "premium" and r.preemptions] == []


def test_the_player_sees_late_and_dropped_stops() -> None:
    jobs = [Job(submitted=NOW + 60 * i, num_gpus=4 if i % 5 == 0 else 1, seconds=HOUR * (1 + i * 7 % 30)) for i in range(60)]
    jobs += [Job(submitted=NOW + 2 * HOUR + 600 * i, num_gpus=8, seconds=1800, tier="premium") for i in range(5)]
    played = play(jobs, OVERLAPPING, release_s=90.0, drop_every=3)
    assert played.dropped > 3 and sum(played.stops.values()) > 6
    assert len(played.ended) == len(jobs)


def test_the_player_sees_promises_and_stops() -> None:
    """So that the property above is not empty."""
    jobs = [Job(submitted=NOW + 60 * i, num_gpus=4 if i % 5 == 0 else 1, seconds=HOUR * (1 + i * 7 % 30)) for i in range(60)]
    jobs += [Job(submitted=NOW + 2 * HOUR + 600 * i, num_gpus=8, seconds=1800, tier="premium") for i in range(5)]
    played = play(jobs, [pool(12, per_node=4, widest=8)])
    assert played.promises > 50
    assert sum(played.stops.values()) > 10
    assert played.broken == []


def test_premium_jobs_that_never_end_to_come_do_not_starve_a_free_one() -> None:
    flood = [Job(submitted=NOW + 300 * i, num_gpus=2, seconds=1200, tier="premium") for i in range(1000)]
    jobs = [*flood, Job(submitted=NOW + 1, num_gpus=4, seconds=HOUR, tier="free")]
    played = play(jobs, [pool(8, per_node=4, widest=8)])
    assert played.started["j1000"] < NOW + 300 * 100, "long before the flood is over"
    assert played.broken == []


def test_a_job_is_stopped_a_bounded_number_of_times() -> None:
    shorts = [Job(submitted=NOW + 2 * HOUR + 1200 * i, num_gpus=1, seconds=1800) for i in range(200)]
    played = play([Job(submitted=NOW, num_gpus=1, seconds=100 * HOUR), *shorts], [pool(1)])
    ran = played.ended["j0000"] - NOW - played.waited["j0000"]
    assert 0 < played.stops["j0000"] <= ran / 1800, "an attempt runs for a while before it is stopped"


WAITING = st.lists(
    st.builds(
        Waiting,
        job_id=st.uuids().map(str),
        tenant=st.sampled_from(["a", "b"]),
        tier=TIERS,
        num_gpus=st.integers(1, 18),
        queued_at=st.floats(0, NOW),
        expected_s=st.floats(0, 1e6),
        due_at=st.none() | st.floats(NOW - 1e5, NOW + 1e5),
        spot=st.booleans(),
        promise=st.none()
        | st.builds(
            Reservation,
            start=st.floats(NOW - 1e5, NOW + 1e5),
            pool=st.sampled_from(["p", "gone"]),
            placement=st.sampled_from([(("node-0", 4),), (("node-1", 2),), (("node-0", 4), ("node-1", 4)), (("lost", 4),)]),
            made_at=st.just(NOW - 1e5),
        ),
    ),
    max_size=12,
    unique_by=lambda j: j.job_id,
)
RUNNING = st.lists(
    st.builds(
        Running,
        job_id=st.uuids().map(str),
        pool=st.just("p"),
        num_gpus=st.just(2),
        expected_end=st.floats(NOW - 1e4, NOW + 1e6),
        tier=TIERS,
        placement=st.sampled_from([(("node-0", 2),), (("node-1", 2),), (("node-2", 2),)]),
        started_at=st.floats(NOW - 1e6, NOW),
        expected_s=st.floats(0, 1e6),
        stopping=st.booleans(),
    ),
    max_size=3,
    unique_by=lambda r: (r.placement, r.job_id),
)


@settings(max_examples=60, deadline=None)
@given(WAITING, RUNNING, st.permutations(range(12)))
def test_the_same_snapshot_gives_the_same_decisions_in_any_order_of_rows(jobs: list[Waiting], held: list[Running], at: list[int]) -> None:
    queue = Snapshot(pools=[pool(12, per_node=4)], waiting=jobs, running=held, used={"a": 1e6, "b": 2e5}, capped={})
    other = replace(queue, waiting=[jobs[i] for i in at if i < len(jobs)], running=held[::-1])
    decisions = schedule(queue, now=NOW)
    assert decisions == schedule(other, now=NOW)
    assert sorted(d.job_id for d in decisions if not isinstance(d, Preempt)) == sorted(j.job_id for j in jobs)


@settings(max_examples=60, deadline=None)
@given(WAITING)
def test_where_nothing_runs_something_starts_whatever_was_promised(jobs: list[Waiting]) -> None:
    """ReservationPlan that lie in the past, overlap, or name nodes that are gone hold up nobody for ever."""
    of = pool(12, per_node=4)
    decisions = schedule(Snapshot(pools=[of], waiting=jobs, running=[]), now=NOW)
    assert (
        any(isinstance(d, Start) for d in decisions)
        or not any(j.num_gpus <= 12 for j in jobs)
        or any(isinstance(d, Wait) and d.promise is not None and d.promise.start > NOW for d in decisions)
    )
    late = [replace(j, promise=replace(j.promise, start=min(j.promise.start, NOW)) if j.promise else None) for j in jobs]
    decisions = schedule(Snapshot(pools=[of], waiting=late, running=[]), now=NOW)
    assert any(isinstance(d, Start) for d in decisions) or not any(j.num_gpus <= 12 for j in jobs)


@settings(max_examples=60, deadline=None)
@given(WAITING, RUNNING)
def test_nobody_is_named_to_another_tenant(jobs: list[Waiting], held: list[Running]) -> None:
    ids = [*(j.job_id for j in jobs), *(r.job_id for r in held)]
    for d in schedule(Snapshot(pools=[pool(12, per_node=4)], waiting=jobs, running=held), now=NOW):
        assert not isinstance(d, Wait | Preempt) or not any(job_id in d.detail for job_id in ids)


FAR = st.lists(
    st.builds(
        lambda job_id, tier, node, done_s, left_s, attempt, stops, stopping: Running(
            job_id=job_id, pool="p", num_gpus=2, expected_end=NOW + left_s, tier=tier, placement=((node, 2),),
            started_at=NOW - attempt * done_s, expected_s=done_s + left_s, queued_at=NOW - done_s, due_at=NOW + 1e6,
            preemptions=stops, stopping=stopping,
        ),
        st.uuids().map(str), TIERS, st.sampled_from(["node-0", "node-1", "node-2"]), st.floats(900, 1e6), st.floats(60, 1e6),
        st.floats(0.01, 1), st.integers(0, 3), st.sampled_from([False, False, True]),
    ),
    min_size=3, max_size=6, unique_by=lambda r: r.job_id,
)  # fmt: skip
"""Running jobs at any share of their expected time."""


@settings(max_examples=150, deadline=None)
@given(WAITING, FAR)
def test_no_search_preempts_a_job_past_its_share(jobs: list[Waiting], held: list[Running]) -> None:
    by_id, per_node = {r.job_id: r for r in held}, Counter(name for r in held for name, _ in r.placement)
    of = pool(2 * max(per_node.values()) * 3, per_node=2 * max(per_node.values()))
    for d in schedule(Snapshot(pools=[of], waiting=jobs, running=held), now=NOW):
        if isinstance(d, Preempt):
            victim = by_id[d.job_id]
            left = victim.expected_end - NOW
            assert left >= (1 - DEFAULT_RULES.protect_past) * victim.expected_s, f"{1 - left / victim.expected_s:.0%} of its time is over"
            assert left >= DEFAULT_RULES.least_left_s and victim.tier != "premium" and not victim.stopping


def test_a_pool_of_two_kinds_of_nodes_and_one_that_is_not_ready_holds_what_fits() -> None:
    of = equal_nodes(8, per_node=4, prefix="small") + tuple(replace(n, ready=False) for n in equal_nodes(8, prefix="big"))
    mixed = Pool(name="p", nodes=of, gpu_type="local", max_gpus_per_job=8)
    job = Waiting(job_id="wide", tenant="t", tier="standard", num_gpus=8, queued_at=NOW, expected_s=60.0)
    (start,) = schedule(Snapshot(pools=[mixed], waiting=[job], running=[]), now=NOW)
    assert isinstance(start, Start)
    assert start.placement == (("small-0", 4), ("small-1", 4))
