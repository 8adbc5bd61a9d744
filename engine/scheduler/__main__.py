"""``python -m engine.scheduler JOBS.csv --gpus 16``: run a day of jobs through the scheduler on a virtual cluster.

The file has a header and the columns ``job_id,submit_s,num_gpus,duration_s`` and, if wanted, ``tenant`` and ``tier``. Prints when each job
started and ended, how long it waited and how often it made room.
"""

import argparse
import csv
import sys
from pathlib import Path

from engine.scheduler.policy import schedule
from engine.scheduler.pools import Pool, equal_nodes
from engine.scheduler.simulation.cluster_simulation import Simulation
from engine.scheduler.simulation.simulated_job import SimulatedJob


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.scheduler")
    parser.add_argument("file", type=Path)
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of the cluster (default: %(default)s)")
    parser.add_argument("--per-node", type=int, default=8, help="GPUs of a node (default: %(default)s)")
    args = parser.parse_args(argv)
    pool = Pool(name="gpus", nodes=equal_nodes(args.gpus, per_node=args.per_node), gpu_type="h100-80gb", max_gpus_per_job=args.gpus)
    jobs = []
    with args.file.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                job = SimulatedJob(
                    job_id=row["job_id"], submit_s=float(row["submit_s"]), num_gpus=int(row["num_gpus"]),
                    duration_s=float(row["duration_s"]), tenant=row.get("tenant") or "tenant", tier=row.get("tier") or "standard",
                )  # fmt: skip
            except (KeyError, TypeError, ValueError) as error:
                parser.error(f"line {number} of {args.file} is no job with job_id, submit_s, num_gpus and duration_s: {error}")
            if job.num_gpus > pool.widest(job.tier):
                parser.error(f"line {number} of {args.file}: {job.num_gpus} GPUs never fit on {args.gpus}")
            jobs.append(job)
    if not jobs:
        parser.error(f"{args.file} has no jobs")
    outcome = Simulation(jobs, [pool], lambda snapshot, now: schedule(snapshot, now=now)).run()
    sys.stdout.write(f"{'job':<20}{'start s':>10}{'end s':>10}{'waited s':>10}{'stops':>7}\n")
    for record in sorted(outcome.records, key=lambda r: r.first_start or 0.0):
        start, end = record.first_start or 0.0, record.end or 0.0
        sys.stdout.write(f"{record.job.job_id[:19]:<20}{start:>10.0f}{end:>10.0f}{record.waited_s:>10.0f}{record.preemptions:>7}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
