"""The simulator's engine: what it counts, what it refuses to believe, and the policies that ours is held against."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from benchmarks.scheduler.simulation import policies, report, synthetic
from benchmarks.scheduler.simulation.policies import easy, fifo, first_fit, shortest_first
from engine.scheduler import Decision, Preempt, Reason, Reservation, Snapshot, Start, Wait
from engine.scheduler.pools import Pool, equal_nodes
from engine.scheduler.simulation.cluster_simulation import Simulation
from engine.scheduler.simulation.costs import Costs
from engine.scheduler.simulation.outcome import Outcome
from engine.scheduler.simulation.simulated_job import SimulatedJob

NO_COSTS = Costs(save_s=0.0, load_s={"lora": 0.0, "large": 0.0, "full": 0.0})


def pool(num_gpus: int, per_node: int = 8) -> Pool:
    return Pool(name="gpus", nodes=equal_nodes(num_gpus, per_node=per_node), gpu_type="h100-80gb", max_gpus_per_job=num_gpus)


def job(
    name: str, submit_s: float, num_gpus: int, duration_s: float, *, tier: str = "standard", checkpoint_s: float = 900.0
) -> SimulatedJob:
    return SimulatedJob(job_id=name, submit_s=submit_s, num_gpus=num_gpus, duration_s=duration_s, tier=tier, checkpoint_s=checkpoint_s)


def starts(jobs: Sequence[SimulatedJob], policy: object, gpus: int = 4) -> dict[str, float | None]:
    outcome = Simulation(jobs, [pool(gpus, per_node=gpus)], policy, tick_s=0).run()  # type: ignore[arg-type]
    return {r.job.job_id: r.first_start for r in outcome.records}


CASE = [job("a", 0, 3, 100), job("b", 1, 4, 50), job("c", 2, 1, 200), job("d", 3, 1, 90), job("e", 4, 1, 10)]
"""Four GPUs. a holds three until 100; b needs all four."""


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        # b waits for a, all others for b; then c, d and e together.
        (fifo, {"a": 0, "b": 100, "c": 150, "d": 150, "e": 150}),
        # c takes the free GPU at 2 and keeps it until 202; d and e follow a, b comes last.
        (first_fit, {"a": 0, "b": 202, "c": 2, "d": 100, "e": 100}),
        # b is promised 100: c would hold a GPU beyond it, d ends at 93 and may, e follows it too late (103) and waits.
        (easy, {"a": 0, "b": 100, "c": 150, "d": 3, "e": 150}),
        # at 100 the shortest are d and e (c has started at 2), b fits when c has ended.
        (shortest_first, {"a": 0, "b": 202, "c": 2, "d": 100, "e": 100}),
    ],
)
def test_a_small_case_comes_out_as_computed_by_hand(policy: object, expected: dict[str, float]) -> None:
    assert starts(CASE, policy) == expected


def test_a_simulation_stops_after_the_round_that_reaches_its_limit_of_work() -> None:
    """Rounds at 0, 1, 2 and 3 consider one job, then one more each, and one node: 2, 3, 4 and 5, 14 in all."""
    stopped = Simulation(CASE, [pool(4, per_node=4)], fifo, tick_s=0, max_work=14).run()
    assert (stopped.rounds, stopped.stopped_at) == (4, 3.0)
    assert [record.first_start for record in stopped.records] == [0.0, None, None, None, None]
    assert Simulation(CASE, [pool(4, per_node=4)], fifo, tick_s=0, max_work=10_000).run().stopped_at is None


def test_shortest_first_prefers_the_shorter_of_two_that_wait() -> None:
    jobs = [job("a", 0, 4, 100), job("long", 1, 4, 80), job("short", 2, 4, 10)]
    assert starts(jobs, shortest_first) == {"a": 0, "short": 100, "long": 110}


def test_easy_lets_a_long_job_overtake_beside_the_promised_gpus() -> None:
    jobs = [job("a", 0, 3, 100), job("b", 1, 3, 50), job("c", 2, 1, 500)]
    assert starts(jobs, easy) == {"a": 0, "b": 100, "c": 2}


def brute_force_easy(jobs: Sequence[SimulatedJob], gpus: int) -> dict[str, float]:
    """EASY by counts, second by second, as one would explain it: no events, no shared code."""
    start: dict[str, float] = {}
    now = 0.0
    while len(start) < len(jobs):
        queue = [j for j in sorted(jobs, key=lambda j: (j.submit_s, j.job_id)) if j.submit_s <= now and j.job_id not in start]
        held = {j.job_id: j for j in jobs if j.job_id in start and start[j.job_id] + j.duration_s > now}
        free = gpus - sum(j.num_gpus for j in held.values())
        while queue and queue[0].num_gpus <= free:
            first = queue.pop(0)
            start[first.job_id], held[first.job_id], free = now, first, free - first.num_gpus
        if queue:
            head, rest = queue[0], queue[1:]
            for candidate in rest:
                if candidate.num_gpus <= free:
                    trial = {**held, candidate.job_id: candidate}
                    if _head_start(head, trial, {**start, candidate.job_id: now}, gpus, now) <= _head_start(head, held, start, gpus, now):
                        start[candidate.job_id], held, free = now, trial, free - candidate.num_gpus
        now += 1.0
    return start


def _head_start(head: SimulatedJob, held: dict[str, SimulatedJob], start: dict[str, float], gpus: int, now: float) -> float:
    moment = now
    while gpus - sum(j.num_gpus for n, j in held.items() if start[n] + j.duration_s > moment) < head.num_gpus:
        moment += 1.0
    return moment


@pytest.mark.parametrize("seed", range(6))
def test_easy_equals_a_brute_force_that_shares_no_code(seed: int) -> None:
    rng = random.Random(seed)
    jobs = [job(f"{i:02d}", float(rng.randint(0, 60)), rng.randint(1, 6), float(rng.randint(1, 40))) for i in range(25)]
    assert starts(jobs, easy, gpus=6) == brute_force_easy(jobs, 6)


def held_at_once(outcome: Outcome, sizes: dict[str, int]) -> None:
    """Replays who held what, and finds no GPU given twice."""
    free = dict(sizes)
    for _, kind, _, placement in outcome.log:
        for node, gpus in placement:
            free[node] += -gpus if kind == "start" else gpus
            assert 0 <= free[node] <= sizes[node]
    assert free == sizes


@pytest.mark.parametrize("name", policies.NAMES)
def test_no_gpu_is_given_twice_and_every_job_ends_once(name: str) -> None:
    jobs = synthetic.wide_gangs(5)[:150]
    outcome = Simulation(jobs, [pool(64)], policies.named(name)).run()
    held_at_once(outcome, {n.name: n.num_gpus for n in pool(64).nodes})
    assert len(outcome.records) == 150
    assert all(r.end is not None for r in outcome.records)
    assert not outcome.broken
    worked = sum(r.job.num_gpus * r.job.duration_s for r in outcome.records)
    end, begin = max(r.end or 0.0 for r in outcome.records), min(j.submit_s for j in jobs)
    held = report.utilisation(outcome) * 64 * (end - begin)
    lost = sum(r.lost_gpu_s for r in outcome.records)
    assert held == pytest.approx(worked + lost, rel=1e-6)  # GPU-seconds in = GPU-seconds out
    for r in outcome.records:
        apart = (r.end or 0.0) - r.job.submit_s - r.waited_s - r.job.duration_s - r.lost_gpu_s / r.job.num_gpus
        assert abs(apart) < 1e-3  # completion = waiting + work + what was lost


def test_the_same_seed_gives_the_same_numbers() -> None:
    jobs = synthetic.diurnal(3)[:80]
    twice = [Simulation(jobs, [pool(32)], policies.ours(), estimate_error=2.0, seed=7).run() for _ in range(2)]
    assert report.detailed(twice[0]) == report.detailed(twice[1])


def scripted(orders: dict[float, Sequence[Decision]]) -> policies.Policy:
    """A policy that does as it is told at each moment, and lets all others wait."""

    def decide(snapshot: Snapshot, now: float) -> list[Decision]:
        said = list(orders.get(now, ()))
        named = {d.job_id for d in said if not isinstance(d, Preempt)}
        rest = [w.job_id for w in snapshot.waiting if w.job_id not in named]
        waits = [Wait(job_id=j, position=i, reason=Reason.WAITING_FOR_QUOTA, detail="", expected_start=None) for i, j in enumerate(rest)]
        return [*(d for d in said if isinstance(d, Preempt) or d.job_id in {w.job_id for w in snapshot.waiting}), *waits]

    return decide


def start(name: str, gpus: int = 4) -> Start:
    return Start(job_id=name, pool="gpus", num_gpus=gpus, placement=(("node-0", gpus),))


def test_a_preempted_job_keeps_its_work_and_pays_for_saving_and_loading() -> None:
    jobs = [job("a", 0, 4, 1000), job("b", 100, 4, 50)]
    orders: dict[float, Sequence[Decision]] = {
        0.0: [start("a")],
        100.0: [Preempt(job_id="a", for_job="b", lost_s=0.0, detail="")],
        125.0: [start("b")],
        175.0: [start("a")],
    }
    outcome = Simulation(jobs, [pool(4, 4)], scripted(orders), costs=Costs(load_s={"lora": 60.0}), tick_s=0).run()
    a, b = outcome.records
    assert (b.first_start, b.end) == (125.0, 175.0)
    assert a.end == 175.0 + 60.0 + 900.0  # loads, then does the nine tenths that are left
    assert (a.waited_s, a.preemptions, a.lost_gpu_s) == (50.0, 1, 4 * (25.0 + 60.0))


def test_a_lost_node_costs_the_work_since_the_newest_checkpoint() -> None:
    sim = Simulation([job("a", 0, 4, 1000, checkpoint_s=300)], [pool(4, 4)], fifo, costs=NO_COSTS, tick_s=0)
    sim._at(700.0, 3, "gpus/node-0")
    (a,) = sim.run().records
    assert (a.failures, a.lost_gpu_s) == (1, 4 * 100.0)
    assert a.end == 700.0 + 3600.0 + 400.0  # repaired after an hour, 600 of 1,000 s were saved


def promise(at: float) -> Reservation:
    return Reservation(start=at, pool="gpus", placement=(("node-0", 4),), made_at=0.0)


def told(name: str, at: float) -> Wait:
    return Wait(job_id=name, position=1, reason=Reason.WAITING_FOR_QUOTA, detail="", expected_start=at, promise=promise(at))


def test_the_engine_itself_sees_a_promise_that_is_broken() -> None:
    jobs = [job("a", 0, 4, 100), job("b", 1, 4, 10), job("c", 2, 4, 30)]
    orders: dict[float, Sequence[Decision]] = {0.0: [start("a")], 1.0: [told("b", 100.0)], 100.0: [start("c")], 130.0: [start("b")]}
    outcome = Simulation(jobs, [pool(4, 4)], scripted(orders), tick_s=0).run()
    assert outcome.broken == [("b", 100.0, 130.0)]


def test_a_promise_that_an_overrun_makes_late_has_slipped_and_is_not_broken() -> None:
    jobs = [job("a", 0, 4, 100), job("b", 1, 4, 10)]
    simulation = Simulation(jobs, [pool(4, 4)], easy, tick_s=0)
    simulation.live["a"].record.estimate_s = 60.0
    outcome = simulation.run()
    assert (outcome.broken, outcome.slipped) == ([], 1)


@pytest.mark.parametrize(
    ("orders", "words"),
    [
        ({0.0: [start("a"), start("b")]}, "are free"),
        ({0.0: [start("a", 3)]}, "for 4 GPUs"),
        ({0.0: [start("a"), start("a")]}, "exactly one"),
    ],
)
def test_a_policy_that_gives_a_gpu_twice_is_caught(orders: dict[float, Sequence[Decision]], words: str) -> None:
    jobs = [job("a", 0, 4, 100), job("b", 0, 4, 100)]
    with pytest.raises(AssertionError, match=words):
        Simulation(jobs, [pool(4, 4)], scripted(orders), tick_s=0).run()


def test_a_policy_that_never_starts_a_job_ends_in_an_error_and_not_in_a_loop() -> None:
    for tick_s in (0.0, 900.0):
        with pytest.raises(RuntimeError, match="nothing will ever happen"):
            Simulation([job("a", 0, 4, 100)], [pool(4, 4)], scripted({}), tick_s=tick_s).run()
