"""Where gangs go."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler import Evaluation, Reason, Rules, Snapshot, Start, Wait, schedule
from engine.scheduler.placement import PoolTimeline
from engine.scheduler.pools import Node, Pool, equal_nodes, local_pool
from tests.engine.scheduler.queue_cases import HOUR, NOW, decide, pool, running, waiting


def test_a_gang_starts_whole_or_not_at_all() -> None:
    decision = decide([waiting("wide", gpus=4)], [running("r", 1)], pool(4))["wide"]
    assert isinstance(decision, Wait)
    assert decision.reason is Reason.WAITING_FOR_QUOTA
    assert "3 of 4 are free" in decision.detail


def test_a_small_gang_goes_onto_the_fullest_node_that_holds_it_whole() -> None:
    held = [running("a", 5, node="node-0"), running("b", 7, node="node-1")]
    assert decide([waiting("j", gpus=2)], held, pool(24, per_node=8))["j"] == Start(
        job_id="j", pool="p", num_gpus=2, placement=(("node-0", 2),)
    )


def test_of_nodes_that_are_as_full_the_first_one_is_taken_whatever_its_fabric() -> None:
    machines = tuple(Node(name=f"node-{i}", num_gpus=4, fabric=fabric) for i, fabric in enumerate("abab"))
    of = Pool(name="p", nodes=machines, gpu_type="h", max_gpus_per_job=4)
    start = decide([waiting("j")], [running("r", 4, node="node-0")], of)["j"]
    assert isinstance(start, Start) and start.placement == (("node-1", 1),)


def test_a_wide_gang_takes_whole_nodes_of_one_fabric_and_its_rest_a_part_of_another() -> None:
    held = [running("a", 1, node="node-0"), running("b", 2, node="node-5")]
    start = decide([waiting("j", gpus=12)], held, pool(32, per_node=4, fabrics_of=4))["j"]
    assert isinstance(start, Start)
    assert start.placement == (("node-1", 4), ("node-2", 4), ("node-3", 4)), "the fabric with the fewest empty nodes that do"
    rest = decide([waiting("j", gpus=10)], held, pool(32, per_node=4, fabrics_of=4))["j"]
    assert isinstance(rest, Start)
    assert rest.placement == (("node-1", 4), ("node-2", 4), ("node-0", 2))


def test_enough_gpus_that_are_not_together_fail_the_topology_and_say_so() -> None:
    held = [running("a", 2, node="node-0"), running("b", 2, node="node-1")]
    for gpus, where in ((3, "on one node"), (8, "whole nodes of one fabric")):
        of = pool(8, per_node=4) if gpus == 3 else pool(16, per_node=4, fabrics_of=2)
        decision = decide([waiting("j", gpus=gpus)], [*held, *([running("c", 1, node="node-2")] if gpus == 8 else [])], of)["j"]
        assert isinstance(decision, Wait)
        assert decision.reason is Reason.TOPOLOGY_PLACEMENT_FAILED
        assert where in decision.detail


def test_a_wide_gang_whose_rest_would_fit_beside_another_job_waits_behind_the_one_that_is_promised_the_nodes() -> None:
    jobs = [waiting("head", gpus=8, expected=60), waiting("wide", gpus=6, expected=HOUR)]
    wait = decide(jobs, [running("r", 2, ends_in=100, node="node-1")], pool(8, per_node=4), rules=Rules(slicing=False))["wide"]
    assert isinstance(wait, Wait)
    assert wait.reason is Reason.WAITING_BEHIND_HEAD


@pytest.mark.parametrize(("num", "starts"), [(2, True), (3, False)])
def test_a_running_gang_whose_nodes_are_not_known_counts_on_as_many_nodes_as_it_needs(num: int, starts: bool) -> None:
    decision = decide([waiting("j", gpus=num)], [running("wide", 6)], pool(8, per_node=4))["j"]
    assert isinstance(decision, Start) is starts


def test_a_running_job_whose_node_is_not_known_counts_on_the_fullest_one_that_holds_it() -> None:
    held = [running("known", 1, node="node-1"), running("unknown", 2)]
    start = decide([waiting("j", gpus=4)], held, pool(8, per_node=4))["j"]
    assert isinstance(start, Start) and start.placement == (("node-0", 4),)


@pytest.mark.parametrize("tier", ["premium", "standard"])
def test_a_job_whose_pools_are_all_down_waits_without_a_reservation_or_an_expected_start(tier: str) -> None:
    down = dataclasses.replace(pool(4), nodes=tuple(dataclasses.replace(n, ready=False) for n in pool(4).nodes))
    wait = decide([waiting("j", tier=tier)], [], down)["j"]
    assert isinstance(wait, Wait)
    assert (wait.reason, wait.promise, wait.expected_start) == (Reason.WAITING_FOR_QUOTA, None, None)


def test_in_a_pool_of_whole_nodes_nobody_shares_one() -> None:
    of = dataclasses.replace(pool(8, per_node=4), packing="whole_node")
    decisions = decide([waiting("a", gpus=1), waiting("b", gpus=2), waiting("c", gpus=1, expected=9000)], [], of)
    assert [d.placement for d in decisions.values() if isinstance(d, Start)] == [(("node-0", 1),), (("node-1", 2),)]
    assert isinstance(decisions["c"], Wait)


def test_in_a_pool_of_whole_nodes_a_gang_never_starts_on_a_promised_node_that_is_too_small_for_it() -> None:
    of = Pool(
        name="p",
        nodes=equal_nodes(2, prefix="small") + equal_nodes(8, prefix="big"), gpu_type="h", max_gpus_per_job=10, packing="whole_node"
    )  # fmt: skip
    held = [running("r", 8, ends_in=1000, node="big-0")]
    decisions = decide([waiting("wide", gpus=10, expected=10), waiting("j", gpus=4, expected=60)], held, of, rules=Rules(slicing=False))
    wide, small = decisions["wide"], decisions["j"]
    assert isinstance(wide, Wait) and wide.promise is not None
    assert wide.promise.placement == (("big-0", 8), ("small-0", 2))
    assert isinstance(small, Wait), "until then 2 GPUs of small-0 are free, not 4"
    assert isinstance(decide([waiting("wide", gpus=10, expected=10), waiting("j", gpus=2, expected=60)], held, of)["j"], Start)


@pytest.mark.parametrize(("gpus", "wide"), [(8, 1), (16, 12)])
def test_in_a_pool_of_whole_nodes_a_gang_that_would_take_reserved_gpus_never_fits_and_says_so(gpus: int, wide: int) -> None:
    of = dataclasses.replace(pool(gpus, per_node=8, reserved=4), packing="whole_node")
    decisions = decide([waiting("lower", gpus=wide), waiting("right", gpus=wide, tier="premium")], [], of)
    lower = decisions["lower"]
    assert isinstance(lower, Wait)
    assert lower.reason is Reason.EXCEEDS_MAX_QUOTA
    assert isinstance(decisions["right"], Start)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([2, 3, 4, 8]), st.sampled_from("ab")), min_size=1, max_size=5), st.integers(0, 12))
def test_as_wide_as_a_pool_says_a_gang_of_each_tier_is_placed_where_nothing_runs_and_no_wider(of: list[tuple[int, str]], kept: int) -> None:
    machines = tuple(Node(name=f"n{i}", num_gpus=n, fabric=f) for i, (n, f) in enumerate(of))
    total = sum(n for n, _ in of)
    whole = Pool(name="p", nodes=machines, gpu_type="h", max_gpus_per_job=total, reserved_gpus=min(kept, total), packing="whole_node")
    for tier in ("premium", "standard"):
        timeline = PoolTimeline(whole, NOW)
        timeline.ready()
        placed = [n for n in range(1, total + 1) if timeline.fits_now(n, tier, HOUR)]
        assert placed == [n for n in range(1, total + 1) if timeline.could_hold(n, tier)]
        assert placed == [n for n in range(1, total + 1) if timeline.earliest(n, tier, HOUR, NOW)[0] == NOW]
        assert tier == "premium" or (placed or [0])[-1] == whole.widest(tier) or not whole.reserved_gpus


def test_a_gang_wider_than_every_pool_says_so_and_blocks_nobody() -> None:
    decisions = decide([waiting("giant", gpus=64, expected=1), waiting("small", expected=2)], [], pool(4))
    giant = decisions["giant"]
    assert isinstance(giant, Wait)
    assert giant.reason is Reason.EXCEEDS_MAX_QUOTA
    assert giant.expected_start is None
    assert isinstance(decisions["small"], Start)


def test_lower_tiers_leave_the_reserved_gpus_free_and_a_premium_job_starts_on_them_at_once() -> None:
    lower = [waiting("a", tier="free"), waiting("b"), waiting("c")]
    decisions = decide(lower, [running("r", 1, ends_in=50)], pool(4, reserved=2))
    assert [j for j, d in decisions.items() if isinstance(d, Start)] == ["b"]
    kept = decisions["c"]
    assert isinstance(kept, Wait)
    assert (kept.reason, kept.expected_start) == (Reason.RESERVED_FOR_PREMIUM, NOW + 50)
    assert "2 of 4 are free, and 2 of the pool are reserved for premium jobs" in kept.detail
    assert isinstance(decide([waiting("wide", gpus=2, tier="premium")], [running("r", 2)], pool(4, reserved=2))["wide"], Start)


def test_premium_jobs_on_shared_gpus_do_not_free_reserved_ones_for_lower_tiers() -> None:
    held = [running("p1", 3, tier="premium", ends_in=30), running("s1", 1, ends_in=90)]
    assert isinstance(decide([waiting("s2")], held[:1], pool(4, reserved=2))["s2"], Start)
    full = decide([waiting("s2")], held, pool(4, reserved=2))["s2"]
    assert isinstance(full, Wait)
    assert (full.reason, full.expected_start) == (Reason.WAITING_FOR_QUOTA, NOW + 30)


def test_a_gang_wider_than_what_its_tier_may_ever_take_says_so() -> None:
    decisions = decide([waiting("s", gpus=3), waiting("p", gpus=3, tier="premium")], [], pool(4, reserved=2))
    assert isinstance(decisions["p"], Start)
    wide = decisions["s"]
    assert isinstance(wide, Wait)
    assert wide.reason is Reason.EXCEEDS_MAX_QUOTA


@pytest.mark.parametrize(
    ("spot", "tier", "hours", "where"),
    [
        pytest.param(True, "standard", 5, "spot", id="spot first for a long job that asks for it"),
        pytest.param(True, "standard", 3, "own", id="a short one runs on demand"),
        pytest.param(True, "premium", 5, "own", id="production runs on demand"),
        pytest.param(False, "free", 5, "own", id="who does not ask runs on demand"),
    ],
)
def test_spot_pools_are_for(spot: bool, tier: str, hours: float, where: str) -> None:
    cheap = Pool(name="spot", nodes=equal_nodes(4, prefix="s"), gpu_type="h", max_gpus_per_job=4, pricing="spot")
    job = dataclasses.replace(waiting("j", tier=tier, expected=hours * HOUR, gpus=4), spot=spot)
    (start,) = schedule(Snapshot(pools=[dataclasses.replace(pool(4), name="own"), cheap], waiting=[job], running=[]), now=NOW)
    assert isinstance(start, Start)
    assert start.pool == where


def test_who_says_nothing_of_spot_runs_on_demand() -> None:
    cheap = Pool(name="spot", nodes=equal_nodes(4, prefix="s"), gpu_type="h", max_gpus_per_job=4, pricing="spot")
    (start,) = schedule(Snapshot(pools=[cheap, pool(4)], waiting=[waiting("j", expected=5 * HOUR)], running=[]), now=NOW)
    assert isinstance(start, Start)
    assert start.pool == "p"


def test_the_gpus_of_a_job_that_is_being_stopped_are_expected_when_it_has_handed_them_over() -> None:
    timeline = PoolTimeline(pool(8), NOW)
    (node,) = timeline.by_name
    timeline.run("long", "standard", 8, ((node, 8),), NOW + HOUR)
    timeline.ready()
    assert timeline.earliest(8, "standard", 60.0, NOW)[0] == NOW + HOUR
    timeline.end_sooner(frozenset({"long"}), NOW + 90)
    assert timeline.earliest(8, "standard", 60.0, NOW)[0] == NOW + 90


def test_a_pool_takes_the_classes_that_it_is_for_and_spot_falls_back_to_demand() -> None:
    large = dataclasses.replace(pool(4), name="large", takes=frozenset({"large"}))
    other = dataclasses.replace(pool(4), takes=frozenset({"lora"}))
    cheap = Pool(name="spot", nodes=equal_nodes(2, prefix="s"), gpu_type="h", max_gpus_per_job=2, pricing="spot")
    job = dataclasses.replace(waiting("j", gpus=2, expected=9 * HOUR), spot=True, job_class="large")
    second = dataclasses.replace(job, job_id="k")
    snapshot = Snapshot(pools=[other, large, cheap], waiting=[job, second], running=[])
    assert {d.job_id: d.pool for d in schedule(snapshot, now=NOW) if isinstance(d, Start)} == {"j": "spot", "k": "large"}


def test_a_pool_without_slots_or_with_none_for_lower_tiers_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        local_pool(0)
    for premium in (-1, 4):
        with pytest.raises(ValueError, match=r"0\.\.3 can be reserved"):
            local_pool(4, premium=premium)
    assert local_pool(4, premium=3).reserved_gpus == 3


def test_an_evaluation_on_several_gpus_waits_for_a_node_that_has_them_all() -> None:
    """A training of that width would take both small nodes."""
    machines = (Node(name="wide", num_gpus=4, ready=False), Node(name="a", num_gpus=2), Node(name="b", num_gpus=2))
    of = Pool(name="p", nodes=machines, gpu_type="h", max_gpus_per_job=4)
    training = waiting("j", gpus=4)
    evaluation = dataclasses.replace(training, evaluation=Evaluation(id=None))
    spread = decide([training], [], of)["j"]
    assert isinstance(spread, Start) and spread.placement == (("a", 2), ("b", 2))
    wait = decide([evaluation], [], of)["j"]
    assert isinstance(wait, Wait) and wait.reason is Reason.EXCEEDS_MAX_QUOTA
    assert "on a node with 4 GPUs in service" in wait.detail
    back = dataclasses.replace(of, nodes=tuple(dataclasses.replace(node, ready=True) for node in machines))
    start = decide([evaluation], [running("r", 1, node="a")], back)["j"]
    assert isinstance(start, Start) and (start.placement, start.evaluation) == ((("wide", 4),), evaluation.evaluation)
    assert isinstance(decide([evaluation], [running("r", 1, node="wide")], back)["j"], Wait), "it is not spread over the small nodes either"
