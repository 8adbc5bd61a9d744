"""The queue's policy."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.pools import Pool, local_pool, nodes
from control_plane.scheduler import Reason, Running, Snapshot, Start, Wait, Waiting, expected_start, order, projected_start, schedule

NOW = 1_000_000.0


def pool(gpus: int, name: str = "p") -> Pool:
    return Pool(name=name, nodes=nodes(gpus, per_node=gpus), gpu_type="local", max_gpus_per_job=gpus)


def waiting(job_id: str, *, gpus: int = 1, tier: str = "standard", waited: float = 0.0, expected: float = 600.0) -> Waiting:
    return Waiting(job_id=job_id, tenant="t", tier=tier, num_gpus=gpus, queued_at=NOW - waited, expected_s=expected)


def running(job_id: str, gpus: int, *, ends_in: float = 60.0, tier: str = "standard") -> Running:
    return Running(job_id=job_id, pool="p", num_gpus=gpus, expected_end=NOW + ends_in, tier=tier)


def decide(jobs: list[Waiting], held: list[Running], gpus: int, *, reserved: int = 0) -> dict[str, Start | Wait]:
    pools = [dataclasses.replace(pool(gpus), reserved_gpus=reserved)]
    return {d.job_id: d for d in schedule(Snapshot(pools=pools, waiting=jobs, running=held), now=NOW)}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(waiting("b", tier="premium"), waiting("a", tier="standard"), id="premium before standard"),
        pytest.param(waiting("b", tier="standard"), waiting("a", tier="free"), id="standard before free"),
        pytest.param(waiting("b", expected=60), waiting("a", expected=600), id="the shorter first"),
        pytest.param(waiting("b", expected=600, waited=36_000), waiting("a", expected=300), id="waiting makes a job shorter"),
        pytest.param(
            waiting("b", expected=9e9, waited=49 * 3600), waiting("a", expected=1), id="past the starvation bound, the oldest first"
        ),
        pytest.param(waiting("a"), waiting("b"), id="equal jobs by id"),
    ],
)
def test_the_order_is(first: Waiting, second: Waiting) -> None:
    assert [j.job_id for j in order([second, first], now=NOW)] == [first.job_id, second.job_id]


def test_a_gang_starts_whole_or_not_at_all() -> None:
    decisions = decide([waiting("wide", gpus=4)], [running("r", 1)], gpus=4)
    assert isinstance(decisions["wide"], Wait)
    assert decisions["wide"].reason is Reason.WAITING_FOR_QUOTA
    assert "3 of 4 are free" in decisions["wide"].detail


def test_jobs_of_a_suspended_tenant_wait_behind_all_others_and_say_why() -> None:
    jobs = [waiting("theirs", tier="premium"), dataclasses.replace(waiting("mine"), tenant="other")]
    queue = Snapshot(pools=[pool(2)], waiting=jobs, running=[], suspended={"t": "unpaid"}, capped={"t": "at its cap"})
    start, wait = schedule(queue, now=NOW)
    assert isinstance(start, Start) and start.job_id == "mine"
    assert wait == Wait(job_id="theirs", position=1, reason=Reason.TENANT_SUSPENDED, detail="unpaid", expected_start=None)


def test_nothing_overtakes_a_blocked_gang_in_its_pool() -> None:
    decisions = decide([waiting("wide", gpus=4, expected=10), waiting("small", gpus=1, expected=20)], [running("r", 1)], gpus=4)
    small = decisions["small"]
    assert isinstance(small, Wait)
    assert small.reason is Reason.WAITING_BEHIND_HEAD
    assert "wide" in small.detail
    assert small.position == 2


def test_a_gang_wider_than_every_pool_says_so_and_blocks_nobody() -> None:
    decisions = decide([waiting("giant", gpus=64, expected=1), waiting("small", expected=2)], [], gpus=4)
    giant = decisions["giant"]
    assert isinstance(giant, Wait)
    assert giant.reason is Reason.EXCEEDS_MAX_QUOTA
    assert giant.expected_start is None
    assert isinstance(decisions["small"], Start)


def test_the_expected_start_is_when_enough_running_jobs_have_ended() -> None:
    held = [running("r1", 2, ends_in=50), running("r2", 2, ends_in=100)]
    assert expected_start(3, 0, held, now=NOW) == NOW + 100
    assert expected_start(2, 0, held, now=NOW) == NOW + 50
    assert expected_start(1, 1, held, now=NOW) == NOW


def test_a_pool_without_slots_or_with_none_for_lower_tiers_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        local_pool(0)
    for premium in (-1, 4):
        with pytest.raises(ValueError, match=r"0\.\.3 can be reserved"):
            local_pool(4, premium=premium)
    assert local_pool(4, premium=3).reserved_gpus == 3


def test_lower_tiers_leave_the_reserved_gpus_free_and_a_premium_job_starts_on_them_at_once() -> None:
    lower = [waiting("a", tier="free"), waiting("b"), waiting("c")]
    decisions = decide(lower, [running("r", 1, ends_in=50)], gpus=4, reserved=2)
    assert [j for j, d in decisions.items() if isinstance(d, Start)] == ["b"]
    kept = decisions["c"]
    assert isinstance(kept, Wait)
    assert (kept.reason, kept.expected_start) == (Reason.RESERVED_FOR_PREMIUM, NOW + 50)
    assert "2 of 4 are free, and 2 of the pool are reserved for premium jobs" in kept.detail
    assert isinstance(decide([waiting("wide", gpus=2, tier="premium")], [running("r", 2)], gpus=4, reserved=2)["wide"], Start)


def test_premium_jobs_on_shared_gpus_do_not_free_reserved_ones_for_lower_tiers() -> None:
    held = [running("p1", 3, tier="premium", ends_in=30), running("s1", 1, ends_in=90)]
    assert isinstance(decide([waiting("s2")], held[:1], gpus=4, reserved=2)["s2"], Start)
    full = decide([waiting("s2")], held, gpus=4, reserved=2)["s2"]
    assert isinstance(full, Wait)
    assert (full.reason, full.expected_start) == (Reason.WAITING_FOR_QUOTA, NOW + 30)


def test_a_gang_wider_than_what_its_tier_may_ever_take_says_so() -> None:
    decisions = decide([waiting("s", gpus=3), waiting("p", gpus=3, tier="premium")], [], gpus=4, reserved=2)
    assert isinstance(decisions["p"], Start)
    wide = decisions["s"]
    assert isinstance(wide, Wait)
    assert wide.reason is Reason.EXCEEDS_MAX_QUOTA


def test_a_start_beside_reserved_gpus_is_projected() -> None:
    pools = [dataclasses.replace(pool(2), reserved_gpus=1)]
    queue = Snapshot(pools=pools, waiting=[waiting("a", expected=100), waiting("mine", expected=300)], running=[])
    assert projected_start(queue, "mine", now=NOW) == NOW + 100


jobs_strategy = st.lists(
    st.builds(
        Waiting,
        job_id=st.uuids().map(str),
        tenant=st.just("t"),
        tier=st.sampled_from(["premium", "standard", "free"]),
        num_gpus=st.integers(1, 12),
        queued_at=st.floats(0, NOW),
        expected_s=st.floats(1, 1e6),
    ),
    max_size=12,
    unique_by=lambda j: j.job_id,
)


@given(jobs_strategy, st.integers(1, 8), st.integers(0, 8), st.integers(0, 7), st.sampled_from(["premium", "free"]))
def test_no_pool_is_ever_overbooked_and_every_job_gets_one_decision(
    jobs: list[Waiting], gpus: int, used: int, reserved: int, tier: str
) -> None:
    reserved = min(reserved, gpus - 1)
    used = min(used, gpus if tier == "premium" else gpus - reserved)
    held = [running("r", used, tier=tier)] if used else []
    pools = [dataclasses.replace(pool(gpus), reserved_gpus=reserved)]
    decisions = schedule(Snapshot(pools=pools, waiting=jobs, running=held), now=NOW)
    tiers = {j.job_id: j.tier for j in jobs} | {"r": tier}
    holding = [(d.job_id, d.num_gpus) for d in decisions if isinstance(d, Start)] + [(r.job_id, r.num_gpus) for r in held]
    assert sum(n for _, n in holding) <= gpus
    assert sum(n for job, n in holding if tiers[job] != "premium") <= gpus - reserved
    assert sorted(d.job_id for d in decisions) == sorted(j.job_id for j in jobs)


@given(jobs_strategy, st.integers(1, 8))
def test_the_same_snapshot_gives_the_same_decisions_in_any_order_of_rows(jobs: list[Waiting], gpus: int) -> None:
    snapshot = Snapshot(pools=[pool(gpus)], waiting=jobs, running=[])
    assert schedule(snapshot, now=NOW) == schedule(dataclasses.replace(snapshot, waiting=list(reversed(jobs))), now=NOW)


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
def test_a_start_is_projected_by_playing_the_queue_forward(ahead: list[Waiting], held: list[Running], starts_in: float) -> None:
    queue = Snapshot(pools=[pool(2)], waiting=[*ahead, waiting("mine", gpus=2, expected=300)], running=held)
    assert projected_start(queue, "mine", now=NOW) == NOW + starts_in


def test_no_start_is_projected_for_what_no_pool_can_hold() -> None:
    queue = Snapshot(pools=[pool(2)], waiting=[waiting("mine", gpus=3)], running=[running("r", 1)])
    assert projected_start(queue, "mine", now=NOW) is None
