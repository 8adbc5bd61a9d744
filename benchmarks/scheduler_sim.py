"""Replays a trace under the platform's policy or another: ``python benchmarks/scheduler_sim.py --trace FILE.csv --gpus N``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.scheduler import plots, policies, report, tables, trace
from benchmarks.scheduler.engine import Costs, Simulation
from control_plane.pools import Pool, nodes


def main(argv: list[str] | None = None) -> int:
    args = _arguments().parse_args(argv)
    try:
        jobs = trace.read(args.trace, num_gpus=args.gpus)
        if args.checkpoint_every is not None:
            jobs = trace.with_cadence(jobs, args.checkpoint_every)
        pool = cluster(args.gpus, args.gpus_per_node, placement=args.placement, reserved=args.reserved)
    except trace.BadTrace as error:
        print(f"scheduler_sim: {error}", file=sys.stderr)
        return 2
    costs = Costs(save_s=args.save_s, node_mtbf_days=args.node_mtbf_days)
    outcomes = {}
    for name in policies.NAMES if args.policy == "all" else (args.policy,):
        outcomes[name] = Simulation(
            jobs, [pool], policies.named(name), costs=costs, estimate_error=args.estimate_error, seed=args.seed
        ).run()
    if args.plots:
        plots.draw(outcomes, args.plots)
    if args.json:
        found = {name: report.summary(outcome) for name, outcome in outcomes.items()}
        print(json.dumps(found if args.policy == "all" else found[args.policy]))
    else:
        print(tables.of({name: report.detailed(outcome) for name, outcome in outcomes.items()}))
    return 0


def cluster(num_gpus: int, per_node: int = 8, *, placement: str = "node", reserved: int = 0) -> Pool:
    """One pool of one fabric; ``count``: one node that holds everything, so that only numbers matter."""
    held = nodes(num_gpus, per_node=num_gpus if placement == "count" else per_node)
    return Pool(name="gpus", nodes=held, gpu_type="h100-80gb", max_gpus_per_job=num_gpus, reserved_gpus=reserved)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scheduler_sim", description=__doc__)
    parser.add_argument(
        "--trace", type=Path, required=True, help="CSV: job_id, submit_time_s, num_gpus, duration_s; optional: tenant, tier, ..."
    )
    parser.add_argument("--gpus", type=_positive, required=True, help="of the whole cluster")
    parser.add_argument("--gpus-per-node", type=_positive, default=8)
    parser.add_argument("--policy", choices=(*policies.NAMES, "all"), default="ours")
    parser.add_argument("--estimate-error", type=_factor, default=1.0, metavar="K", help="estimates are off by up to K times either way")
    parser.add_argument("--seed", type=int, default=0, help="of errors and failures")
    parser.add_argument("--placement", choices=("node", "count"), default="node", help="count: GPUs are only counted, nodes do not matter")
    parser.add_argument("--reserved", type=int, default=0, help="GPUs that are kept for premium jobs")
    parser.add_argument("--checkpoint-every", type=float, metavar="S", help="seconds between checkpoints of all jobs; 0: none")
    parser.add_argument("--save-s", type=float, default=Costs().save_s, help="from the notice to free GPUs")
    parser.add_argument("--node-mtbf-days", type=float, default=Costs().node_mtbf_days, help="mean time between failures of a node")
    parser.add_argument("--json", action="store_true", help="the nine numbers only")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="pictures of waits, queue and use")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _factor(text: str) -> float:
    value = float(text)
    if not 1.0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a factor of at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
