"""How long one decision takes: queues of up to 10,000 jobs on up to 1,000 nodes, in several states, and whole rounds with the database.

    python -m benchmarks.scheduler.decision_speed [--quick] [--out benchmarks/scheduler_decision_202611.json]

The policy alone is timed on snapshots in memory, as a round reads them; a round is ``place`` on a durable PostgreSQL of its own: the queue
read, decided and written. The goals: 1 s with 10,000 jobs on 1,000 nodes, 50 ms with 1,000 on 100.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from benchmarks.scheduler.decision_rows import QueuedJob, add_jobs, add_tenants, platform_on, scratch_database
from control_plane.queue import cycle
from engine import scheduler
from engine.scheduler import Preempt, Running, Snapshot, Start, Wait, Waiting
from engine.scheduler.pools import Pool, equal_nodes

NOW = datetime(2026, 11, 20, tzinfo=UTC)
PER_NODE, FABRIC_OF = 8, 32
"""GPUs of a node (HGX); nodes of a fabric (a rail of 256 GPUs)."""
SIZES, SIZE_WEIGHTS = (1, 2, 4, 8, 16, 32), (60, 12, 10, 12, 4, 2)
"""GPUs of a job: as in the Philly trace most are single, one of twenty spans nodes."""
TIERS, TIER_WEIGHTS = ("premium", "standard", "free"), (10, 20, 70)
SHORTEST_S, LONGEST_S = 600.0, 48 * 3600.0
"""Lengths are drawn evenly on a log scale between ten minutes and two days."""
NUM_TENANTS = 200
GOALS_S = {(10_000, 1_000): 1.0, (1_000, 100): 0.05}
STATES = ("blocked", "half free", "all free", "gangs", "premium arrives", "overdue", "second round")


def snapshot(state: str, num_jobs: int, num_nodes: int, *, seed: int = 0) -> Snapshot:
    """A queue in the `state`: what runs, what waits."""
    draw = random.Random(seed)
    machines = equal_nodes(num_nodes * PER_NODE, per_node=PER_NODE, fabric="rail", fabrics_of=FABRIC_OF)
    pool = Pool(name="h100", nodes=machines, gpu_type="h100-80gb", max_gpus_per_job=FABRIC_OF * PER_NODE)
    busy = {"half free": 0.5, "all free": 0.0}.get(state, 1.0)
    running = _running(pool, busy, draw, tiers=("free",) if state == "premium arrives" else TIERS)
    waiting = [_waiting(i, state, draw) for i in range(num_jobs)]
    used = {f"t-{i:03d}": draw.uniform(0, 1e6) for i in range(NUM_TENANTS)}
    found = Snapshot(pools=[pool], waiting=waiting, running=running, used=used)
    return _one_round_later(found) if state == "second round" else found


def _length(draw: random.Random) -> float:
    return math.exp(draw.uniform(math.log(SHORTEST_S), math.log(LONGEST_S)))


def _running(pool: Pool, busy: float, draw: random.Random, *, tiers: Sequence[str]) -> list[Running]:
    found: list[Running] = []
    now = NOW.timestamp()
    for node in pool.nodes[: round(busy * len(pool.nodes))]:
        left = node.num_gpus
        while left:
            gpus = min(left, draw.choice((1, 1, 2, 4, 8)))
            left -= gpus
            length = _length(draw)
            ran = draw.uniform(0, length)
            found.append(
                Running(
                    job_id=f"run-{len(found):06d}", pool=pool.name, num_gpus=gpus, expected_end=now + length - ran, tier=draw.choice(tiers),
                    tenant=f"t-{draw.randrange(NUM_TENANTS):03d}", placement=((node.name, gpus),), started_at=now - ran, expected_s=length,
                    saved_at=now - draw.uniform(0, min(ran, 600.0)), queued_at=now - ran - 60,
                )
            )  # fmt: skip
    return found


def _waiting(number: int, state: str, draw: random.Random) -> Waiting:
    now = NOW.timestamp()
    size = draw.choice((16, 32, 64)) if state == "gangs" else draw.choices(SIZES, SIZE_WEIGHTS)[0]
    tier = draw.choices(TIERS, TIER_WEIGHTS)[0]
    waited = draw.uniform(0, 12 * 3600.0)
    return Waiting(
        job_id=f"job-{number:06d}", tenant=f"t-{draw.randrange(NUM_TENANTS):03d}", tier=tier, num_gpus=size, queued_at=now - waited,
        expected_s=_length(draw), due_at=now - draw.uniform(0, waited) if state == "overdue" else None,
    )  # fmt: skip


def _one_round_later(before: Snapshot) -> Snapshot:
    """The queue as the round after finds it: what was decided is kept, nothing has ended, a few have come."""
    decisions = scheduler.schedule(before, now=NOW.timestamp() - 1)
    told = {d.job_id: d for d in decisions if isinstance(d, Wait)}
    waiting = [replace(w, due_at=told[w.job_id].due_at, promise=told[w.job_id].promise) for w in before.waiting if w.job_id in told]
    jobs = {w.job_id: w for w in before.waiting}
    now = NOW.timestamp()
    started = [
        Running(job_id=d.job_id, pool=d.pool, num_gpus=d.num_gpus, expected_end=now + jobs[d.job_id].expected_s, tier=jobs[d.job_id].tier,
                tenant=jobs[d.job_id].tenant, placement=d.placement, started_at=now - 1, expected_s=jobs[d.job_id].expected_s)
        for d in decisions if isinstance(d, Start)
    ]  # fmt: skip
    return replace(before, waiting=waiting, running=[*before.running, *started])


@dataclass(kw_only=True, slots=True)
class Taken:
    """What calls took, one number each."""

    wall_s: list[float]
    cpu_s: list[float]
    """Of this process alone: what a machine that does nothing else would take."""

    def summary(self) -> dict[str, float]:
        return {"num": len(self.wall_s), **_percentiles("", self.wall_s), **_percentiles("cpu_", self.cpu_s)}


def timed(call: Callable[[], Any], times: int, *, into: Taken | None = None) -> tuple[Taken, Any]:
    """Times of `times` calls, garbage collected before and not during one, and the last one's answer."""
    taken, answer = into or Taken(wall_s=[], cpu_s=[]), None
    for _ in range(times):
        gc.collect()
        gc.disable()
        began, cpu = time.perf_counter(), time.process_time()
        answer = call()
        taken.wall_s.append(time.perf_counter() - began)
        taken.cpu_s.append(time.process_time() - cpu)
        gc.enable()
    return taken, answer


def _percentiles(of: str, seconds: Sequence[float]) -> dict[str, float]:
    if len(seconds) < 2:
        return {f"{of}p50_s": round(seconds[0], 4), f"{of}p99_s": round(seconds[0], 4)}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {f"{of}p50_s": round(cuts[49], 4), f"{of}p99_s": round(cuts[98], 4)}


def decision(state: str, num_jobs: int, num_nodes: int, *, times: int, seed: int = 0) -> dict[str, Any]:
    """One state's decision, timed."""
    given = snapshot(state, num_jobs, num_nodes, seed=seed)
    taken, decided = timed(lambda: scheduler.schedule(given, now=NOW.timestamp()), times)
    kinds = {kind.__name__.lower(): sum(isinstance(d, kind) for d in decided) for kind in (Start, Wait, Preempt)}
    return {"state": state, "jobs": num_jobs, "nodes": num_nodes, **taken.summary(), **kinds, "running": len(given.running)}


def rounds(num_jobs: int, num_nodes: int, *, times: int) -> dict[str, Any]:
    """``place`` on a real database: the first round of a queue that nobody has looked at, those after it, and one with a new job."""
    given = snapshot("all free", num_jobs, num_nodes)
    with scratch_database() as url:
        platform = replace(platform_on(url), clock=lambda: NOW)
        with platform.engine.begin() as conn:
            conn.exec_driver_sql("SET LOCAL statement_timeout = 0")
            add_tenants(conn, [f"t-{i:03d}" for i in range(NUM_TENANTS)])
            add_jobs(conn, [_queued(w) for w in given.waiting])
        with platform.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
            conn.exec_driver_sql("VACUUM (ANALYZE) jobs")
        first, decided = timed(lambda: cycle.run_cycle(platform, available=given.pools), 1)
        later, _ = timed(lambda: cycle.run_cycle(platform, available=given.pools), times)
        fresh = Taken(wall_s=[], cpu_s=[])
        for number in range(times):
            with platform.engine.begin() as conn:
                add_jobs(conn, [replace(_queued(given.waiting[number]), id=f"new-{number}", queued_at=NOW)])
            timed(lambda: cycle.run_cycle(platform, available=given.pools), 1, into=fresh)
        platform.logins.dispose()
    return {
        "jobs": num_jobs, "nodes": num_nodes, "started_by_the_first": sum(isinstance(d, Start) for d in decided),
        "first": first.summary(), "nothing_new": later.summary(), "one_arrived": fresh.summary(),
    }  # fmt: skip


def _queued(job: Waiting) -> QueuedJob:
    at = NOW - timedelta(seconds=NOW.timestamp() - job.queued_at)
    return QueuedJob(id=job.job_id, tenant=job.tenant, tier=job.tier, num_gpus=job.num_gpus, expected_s=job.expected_s, queued_at=at)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1,000 jobs at most, three times each")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--states", nargs="*", default=STATES)
    parser.add_argument("--no-database", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    times = 3 if args.quick else args.times
    sizes = [(1_000, 100)] if args.quick else list(GOALS_S)
    found: dict[str, Any] = {"decisions": [], "growth": [], "rounds": []}
    for num_jobs, num_nodes in sizes:
        for state in args.states:
            found["decisions"].append(decision(state, num_jobs, num_nodes, times=times))
            print(json.dumps(found["decisions"][-1]), flush=True)
    if not args.quick:
        for num_jobs in (100, 300, 1_000, 3_000, 10_000, 30_000):
            found["growth"] += [decision(s, num_jobs, num_jobs // 10, times=3, seed=1) for s in ("blocked", "half free", "second round")]
    if not args.no_database:
        found["rounds"] = [rounds(num_jobs, num_nodes, times=min(times, 10)) for num_jobs, num_nodes in sizes]
        print(json.dumps(found["rounds"], indent=1))
    found["goals_met"] = all(d["cpu_p99_s"] <= GOALS_S[d["jobs"], d["nodes"]] for d in found["decisions"])
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
