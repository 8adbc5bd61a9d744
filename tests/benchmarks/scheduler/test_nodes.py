"""Where gangs of the compared policies go: as well as those of the platform's own."""

from __future__ import annotations

import random

import pytest

from benchmarks.scheduler.simulation import policies
from benchmarks.scheduler.simulation.nodes import place
from engine import scheduler
from engine.scheduler import Placement, Running, Snapshot, Start, Waiting
from engine.scheduler.pools import Pool, equal_nodes
from engine.scheduler.simulation.cluster_simulation import Simulation
from engine.scheduler.simulation.costs import Costs
from engine.scheduler.simulation.simulated_job import SimulatedJob


def pool(num_gpus: int, fabrics_of: int = 0) -> Pool:
    return Pool(name="gpus", nodes=equal_nodes(num_gpus, fabrics_of=fabrics_of), gpu_type="h100-80gb", max_gpus_per_job=num_gpus)


def job(name: str, submit_s: float, num_gpus: int, duration_s: float) -> SimulatedJob:
    return SimulatedJob(job_id=name, submit_s=submit_s, num_gpus=num_gpus, duration_s=duration_s)


@pytest.mark.parametrize("num_gpus", [4, 8, 12, 20, 27, 44])
def test_the_empty_cluster_holds_every_gang_up_to_all_of_its_gpus(num_gpus: int) -> None:
    cluster = pool(num_gpus)
    for width in range(1, num_gpus + 1):
        placement = place(cluster, {n.name: n.num_gpus for n in cluster.nodes}, width)
        assert placement is not None
        assert sum(gpus for _, gpus in placement) == width


@pytest.mark.parametrize("name", policies.NAMES)
def test_gangs_and_clusters_that_are_no_multiple_of_a_node_are_run_to_the_end(name: str) -> None:
    rng = random.Random(name)
    for num_gpus in (12, 20, 44):
        widths = [num_gpus, *(rng.choice((1, 3, 8, 12, 20)) for _ in range(40))]
        jobs = [job(f"{i:02d}", rng.uniform(0, 5000), min(w, num_gpus), rng.uniform(0, 900)) for i, w in enumerate(widths)]
        outcome = Simulation(jobs, [pool(num_gpus)], policies.named(name)).run()
        assert all(r.end is not None for r in outcome.records)


@pytest.mark.parametrize("name", policies.NAMES)
def test_a_gang_of_all_gpus_outlives_lost_nodes_under_every_policy(name: str) -> None:
    jobs = [job("a", 0, 12, 20_000), job("b", 1, 12, 20_000), job("c", 2, 4, 5_000)]
    outcome = Simulation(jobs, [pool(12)], policies.named(name), costs=Costs(node_mtbf_days=0.3), seed=3).run()
    assert sum(r.failures for r in outcome.records) > 0
    assert all(r.end is not None for r in outcome.records)


def of_ours(cluster: Pool, held: Placement, width: int) -> Placement | None:
    running = [
        Running(job_id=f"r{i}", pool="gpus", num_gpus=gpus, expected_end=1e6, tier="standard", placement=((node, gpus),))
        for i, (node, gpus) in enumerate(held)
    ]
    waiting = Waiting(job_id="w", tenant="t", tier="standard", num_gpus=width, queued_at=0.0, expected_s=60.0)
    decision = scheduler.schedule(Snapshot(pools=[cluster], waiting=[waiting], running=running), now=0.0)[0]
    return decision.placement if isinstance(decision, Start) else None


@pytest.mark.parametrize("fabrics_of", [0, 3])
def test_no_policy_has_better_nodes_than_another(fabrics_of: int) -> None:
    rng = random.Random(fabrics_of)
    cluster = pool(60, fabrics_of)
    wide = 0
    for _ in range(150):
        free = {n.name: n.num_gpus - (rng.choice((0, 0, 0, 2, 5)) if n.num_gpus == 8 else 0) for n in cluster.nodes}
        held = tuple((n.name, n.num_gpus - free[n.name]) for n in cluster.nodes if free[n.name] < n.num_gpus)
        width = rng.choice((1, 5, 8, 12, 14, 16, 20, 28))
        expected = of_ours(cluster, held, width)
        assert place(cluster, free, width) == expected, (free, width)
        wide += expected is not None and len(expected) > 1
    assert wide > 30
