"""Replays a trace under the platform's policy or another: ``python benchmarks/scheduler_sim.py --trace FILE.csv --gpus N``."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.scheduler.simulation import policies, report, tables, trace
from benchmarks.scheduler.simulation.nodes import place
from engine.scheduler.pools import Pool, equal_nodes
from engine.scheduler.simulation.cluster_simulation import Simulation
from engine.scheduler.simulation.costs import Costs
from engine.scheduler.simulation.simulated_job import SimulatedJob

LEAST_MTBF_DAYS = Costs().repair_s / 86400


def main(argv: list[str] | None = None) -> int:
    parser = _arguments()
    args = parser.parse_args(argv)
    if args.reserved >= args.gpus:
        parser.error(f"argument --reserved: {args.reserved} of {args.gpus} GPUs; at least one must be left for jobs that are not premium")
    try:
        jobs = trace.read(args.trace, num_gpus=args.gpus)
        if args.checkpoint_every is not None:
            jobs = trace.with_cadence(jobs, args.checkpoint_every)
        pool = cluster(args.gpus, args.gpus_per_node, placement=args.placement, reserved=args.reserved)
        refuse_unplaceable(jobs, pool, args.trace)
    except trace.BadTrace as error:
        print(f"scheduler_sim: {error}", file=sys.stderr)
        return 2
    costs = Costs(save_s=args.save_s, node_mtbf_days=args.node_mtbf_days)
    outcomes = {}
    for name in policies.NAMES if args.policy == "all" else (args.policy,):
        outcomes[name] = Simulation(
            jobs, [pool], policies.named(name), costs=costs, estimate_error=args.estimate_error, seed=args.seed
        ).run()
    if args.json:
        found = {name: report.summary(outcome) for name, outcome in outcomes.items()}
        print(json.dumps(found if args.policy == "all" else found[args.policy]))
    else:
        print(tables.of({name: report.detailed(outcome) for name, outcome in outcomes.items()}))
    return 0


def cluster(num_gpus: int, per_node: int = 8, *, placement: str = "node", reserved: int = 0) -> Pool:
    """One pool of one fabric; ``count``: one node that holds everything, so that only numbers matter."""
    held = equal_nodes(num_gpus, per_node=num_gpus if placement == "count" else per_node)
    return Pool(name="gpus", nodes=held, gpu_type="h100-80gb", max_gpus_per_job=num_gpus, reserved_gpus=reserved)


def refuse_unplaceable(jobs: Sequence[SimulatedJob], pool: Pool, path: Path) -> None:
    """:class:`trace.BadTrace` for the first job that the empty cluster cannot hold: it would wait for ever."""
    empty = {n.name: n.num_gpus for n in pool.nodes}
    held: dict[tuple[int, str], bool] = {}
    for job in jobs:
        shape = job.num_gpus, job.tier
        if shape not in held:
            held[shape] = job.num_gpus <= pool.widest(job.tier) and place(pool, empty, job.num_gpus) is not None
        if not held[shape]:
            raise trace.BadTrace(
                f"{path}: job {job.job_id!r} of tier {job.tier} needs {job.num_gpus} GPUs at once, the empty cluster can give it "
                f"{pool.widest(job.tier)}; replay it with more --gpus or less --reserved"
            )


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scheduler_sim", description=__doc__)
    parser.add_argument(
        "--trace", type=Path, required=True, help="CSV: job_id, submit_time_s, num_gpus, duration_s; optional: tenant, tier, ..."
    )
    parser.add_argument("--gpus", type=_whole(1), required=True, help="of the whole cluster")
    parser.add_argument("--gpus-per-node", type=_whole(1), default=8)
    parser.add_argument("--policy", choices=(*policies.NAMES, "all"), default="ours")
    parser.add_argument("--estimate-error", type=_factor, default=1.0, metavar="K", help="estimates are off by up to K times either way")
    parser.add_argument("--seed", type=int, default=0, help="of errors and failures")
    parser.add_argument("--placement", choices=("node", "count"), default="node", help="count: GPUs are only counted, nodes do not matter")
    parser.add_argument("--reserved", type=_whole(0), default=0, help="GPUs that are kept for premium jobs")
    parser.add_argument("--checkpoint-every", type=_seconds, metavar="S", help="seconds between checkpoints of all jobs; 0: none")
    parser.add_argument("--save-s", type=_seconds, default=Costs().save_s, help="from the notice to free GPUs")
    parser.add_argument(
        "--node-mtbf-days", type=_mtbf, default=math.inf, help="mean time between failures of a node; no failures if absent"
    )
    parser.add_argument("--json", action="store_true", help="the nine numbers only")
    return parser


def _whole(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is no whole number of at least {least}")
        return int(text)

    return read


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a number") from None


def _factor(text: str) -> float:
    value = _number(text)
    if not 1.0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a factor of at least 1")
    return value


def _seconds(text: str) -> float:
    value = _number(text)
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} are no seconds; 0 or more are")
    return value


def _mtbf(text: str) -> float:
    value = _number(text)
    if not value >= LEAST_MTBF_DAYS:
        raise argparse.ArgumentTypeError(f"{text} days are less than the hour that a repair takes; give 0.05 or more, or leave it out")
    return value


if __name__ == "__main__":
    sys.exit(main())
