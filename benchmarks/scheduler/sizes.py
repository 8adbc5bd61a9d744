"""The planned sizes on the planned pools: does each class start when it should, and how does a round's cost grow with ten times as much?

``python -m benchmarks.scheduler.sizes [--seeds N] [--days N] [--scales 1,2,5,10] [--out FILE.json]``: replays the planned mix on the
pools of ``deploy/pools.yaml``, on one pool of as many GPUs, on pools that share nothing, and with more fabrics; then on k times the
pools with k times the jobs.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.scheduler.simulation import synthetic
from benchmarks.scheduler.simulation.policies import ours
from control_plane.capacity import configured_pools
from engine.scheduler import Decision, Snapshot
from engine.scheduler.pools import Pool, equal_nodes
from engine.scheduler.simulation.cluster_simulation import Simulation
from engine.scheduler.simulation.costs import Costs
from engine.scheduler.simulation.outcome import Outcome
from engine.scheduler.simulation.simulated_job import SimulatedJob

SHIPPED = Path(__file__).parents[2] / "deploy" / "pools.yaml"
PROMISED = {"premium": 300.0, "standard": 3600.0}


def shipped() -> list[Pool]:
    return list(configured_pools.load(SHIPPED, gpu_types=("h100-80gb",)))


def one_pool(num_gpus: int) -> list[Pool]:
    """The same GPUs without walls: 40 nodes of 8 and the rest, all in fabrics of four nodes."""
    made = equal_nodes(num_gpus, fabric="ib", fabrics_of=4)
    return [Pool(name="all", nodes=made, gpu_type="h100-80gb", max_gpus_per_job=32)]


def walled(pools: Sequence[Pool]) -> list[Pool]:
    """Each pool for its own class, nothing lent."""
    own = {"small": {"lora"}, "large": {"large"}, "fabric": {"full"}}
    return [replace(p, takes=frozenset(own[p.name])) for p in pools]


def times(pools: Sequence[Pool], k: int) -> list[Pool]:
    """`k` times as many nodes, in `k` times as many fabrics; what is kept for premium grows with them."""
    return [
        replace(
            p,
            nodes=tuple(replace(n, name=f"{n.name}.{i}", fabric=f"{n.fabric}.{i}" if n.fabric else "") for i in range(k) for n in p.nodes),
            reserved_gpus=k * p.reserved_gpus,
        )
        for p in pools
    ]


def mix(seed: int, *, days: float, k: int = 1) -> list[SimulatedJob]:
    """`k` independent planned mixes at once, each of tenants of its own."""
    return sorted(
        (
            replace(j, job_id=f"{i}-{j.job_id}", tenant=f"{i}-{j.tenant}")
            for i in range(k)
            for j in synthetic.planned_mix(seed * 1000 + i, days=days)
        ),
        key=lambda j: (j.submit_s, j.job_id),
    )


class Timed:
    """A policy with the time that its decisions took, by how many jobs they were about."""

    def __init__(self) -> None:
        self.policy, self.took = ours(), list[tuple[int, float]]()

    def __call__(self, snapshot: Snapshot, now: float) -> Sequence[Decision]:
        begun = time.process_time()
        made = self.policy(snapshot, now)
        self.took.append((len(snapshot.waiting), time.process_time() - begun))
        return made


def replay(jobs: Sequence[SimulatedJob], pools: Sequence[Pool], *, seed: int = 0) -> tuple[Outcome, Timed]:
    policy = Timed()
    outcome = Simulation(jobs, pools, policy, costs=Costs(), estimate_error=1.0, seed=seed).run()
    return outcome, policy


def by_class(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    """First waits of each class and tier, seconds."""
    waits: defaultdict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        for r in outcome.records:
            waits[f"{r.job.job_class}/{r.job.tier}"].append((r.first_start or 0.0) - r.job.submit_s)
    return {key: _waits(found, PROMISED.get(key.partition("/")[2])) for key, found in sorted(waits.items())}


def _waits(found: list[float], promised: float | None) -> dict[str, float]:
    ordered = sorted(found)
    late = {} if promised is None else {"late": sum(w > promised for w in found)}
    return {
        "jobs": len(found), "mean_s": round(statistics.mean(found), 1), "p99_s": round(ordered[int(0.99 * (len(ordered) - 1))], 1),
        "max_s": round(ordered[-1], 1), **late,
    }  # fmt: skip


def landed(outcomes: Sequence[Outcome], pools: Sequence[Pool]) -> dict[str, dict[str, float]]:
    """Share of each class's GPU time in each pool, and each pool's utilisation while jobs came."""
    where = {n.name: p.name for p in pools for n in p.nodes}
    classes: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for outcome in outcomes:
        kinds = {r.job.job_id: r.job.job_class for r in outcome.records}
        begun: dict[str, float] = {}
        for moment, what, job, placement in outcome.log:
            if what == "start":
                begun[job] = moment
            elif job in begun:
                held = (moment - begun.pop(job)) * sum(n for _, n in placement)
                classes[kinds[job]][where[placement[0][0]]] += held
    return {kind: {pool: round(s / sum(found.values()), 3) for pool, s in found.items()} for kind, found in classes.items()}


def with_fabrics(count: int) -> list[Pool]:
    """The shipped pools, `count` fabrics of 32 GPUs for gangs of several nodes."""
    small, large, fabric = shipped()
    gpus = 32 * count
    return [small, large, replace(fabric, nodes=equal_nodes(gpus, prefix="fabric", fabric="ib", fabrics_of=4), reserved_gpus=gpus)]


def layouts(seeds: int, days: float, only: Sequence[str]) -> dict[str, Any]:
    """The planned mix on layouts of the same GPUs, and on more of those that full fine-tuning takes."""
    found = {}
    every = {
        "shipped": shipped(), "one pool": one_pool(sum(p.num_gpus for p in shipped())), "walled": walled(shipped()),
        "8 fabrics": with_fabrics(8), "10 fabrics": with_fabrics(10),
    }  # fmt: skip
    for name, pools in ((name, every[name]) for name in only or every):
        outcomes = [replay(mix(seed, days=days), pools, seed=seed)[0] for seed in range(seeds)]
        found[name] = {
            "gpus": sum(p.num_gpus for p in pools), "weeks": seeds * days / 7, "waits": by_class(outcomes),
            "landed": landed(outcomes, pools),
            "broken_reservations": sum(len(o.broken) for o in outcomes),
            "preemptions": sum(r.preemptions for o in outcomes for r in o.records),
        }  # fmt: skip
        print(name, json.dumps(found[name]), flush=True)
    return found


def growth(scales: Sequence[int], days: float) -> list[dict[str, Any]]:
    """Cost of deciding at `k` times the planned size: CPU seconds of the policy alone."""
    found = []
    for k in scales:
        pools, jobs = times(shipped(), k), mix(0, days=days, k=k)
        begun = time.process_time()
        outcome, policy = replay(jobs, pools)
        took = sorted(s for _, s in policy.took)
        row = {
            "times": k, "gpus": outcome.num_gpus, "nodes": sum(len(p.nodes) for p in pools), "jobs": len(jobs), "decisions": len(took),
            "decision_ms_mean": round(1000 * statistics.mean(took), 2),
            "decision_ms_p99": round(1000 * took[int(0.99 * (len(took) - 1))], 2),
            "decision_ms_max": round(1000 * took[-1], 2), "most_waiting": max(n for n, _ in policy.took),
            "policy_s_a_day": round(sum(took) / days, 2), "simulation_s": round(time.process_time() - begun, 1),
            "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        }  # fmt: skip
        found.append(row)
        print(json.dumps(row), flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> Mapping[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--layouts", default="", help="Some of them, with commas; all if absent.")
    parser.add_argument("--scales", default="1,2,5,10", help="Multiples of the planned size, with commas; 0: none.")
    parser.add_argument("--scale-days", type=float, default=1.0)
    parser.add_argument("--out", type=Path, help="Added to, if it is there.")
    asked = parser.parse_args(argv)
    before = json.loads(asked.out.read_text()) if asked.out and asked.out.exists() else {"layouts": {}, "growth": []}
    made = layouts(asked.seeds, asked.days, [name for name in asked.layouts.split(",") if name])
    grown = growth([k for k in map(int, asked.scales.split(",")) if k], asked.scale_days)
    result = {"layouts": before["layouts"] | made, "growth": grown or before["growth"]}
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
