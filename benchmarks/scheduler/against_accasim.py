"""Our EASY against that of accasim 1.1.3, start by start.

``python -m benchmarks.scheduler.against_accasim --trace FILE.csv --gpus N --python P``

accasim lives in an environment of its own (``pip install accasim==1.1.3``); P is that environment's interpreter. Its scheduler lets a job
overtake only if it ends before the reserved time, so ours is asked for the same; GPUs are only counted. As shipped, it hands an empty list
of reserved nodes to its allocator, which then holds nothing back: that is run too, and counted apart.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.scheduler.simulation import policies, report, synthetic, trace
from control_plane.capacity.pools import Pool, nodes
from control_plane.queue.simulation.cluster_simulation import Simulation
from control_plane.queue.simulation.simulated_job import SimulatedJob

DRIVER = Path(__file__).with_name("accasim_driver.py")
RESULT = Path(__file__).parents[1] / "scheduler_accasim_202611.json"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="a CSV trace; without it only the made ones are compared")
    parser.add_argument("--gpus", type=int, default=144)
    parser.add_argument("--python", type=Path, required=True, help="an interpreter with accasim 1.1.3")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args(argv)
    cases: dict[str, tuple[list[SimulatedJob], int]] = {
        name: (synthetic.MADE[name][0](1), synthetic.MADE[name][1]) for name in ("wide-gangs", "diurnal")
    }
    if args.trace:
        cases = {args.trace.stem: (trace.read(args.trace, num_gpus=args.gpus), args.gpus), **cases}
    found = {name: compare(jobs, gpus, args.python) for name, (jobs, gpus) in cases.items()}
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 0 if all(one["same_starts"] == one["jobs"] for one in found.values()) else 1


def compare(jobs: Sequence[SimulatedJob], gpus: int, python: Path) -> dict[str, Any]:
    """How many jobs start at the same second in both, and the waits of both."""
    whole = [replace(j, submit_s=float(round(j.submit_s)), duration_s=float(max(1, round(j.duration_s)))) for j in jobs]
    pool = Pool(name="gpus", nodes=nodes(gpus, per_node=gpus), gpu_type="h100-80gb", max_gpus_per_job=gpus)
    numbered = [replace(j, job_id=f"{i + 1:08d}") for i, j in enumerate(sorted(whole, key=lambda j: (j.submit_s, j.job_id)))]
    outcome = Simulation(numbered, [pool], functools.partial(policies.easy, beside=False), tick_s=0).run()
    ours = {str(int(r.job.job_id)): r.first_start or 0.0 for r in outcome.records}
    theirs = _theirs(numbered, gpus, python)
    submitted = {str(int(j.job_id)): j.submit_s for j in numbered}
    same = sum(abs(ours[n] - start) < 1.0 for n, start in theirs["honouring"].items())
    return {
        "jobs": len(ours),
        "gpus": gpus,
        "same_starts": same,
        "ours": _waits(ours, submitted),
        "accasim": _waits(theirs["honouring"], submitted),
        "accasim_as_shipped": _waits(theirs["shipped"], submitted),
    }


def _theirs(jobs: Sequence[SimulatedJob], gpus: int, python: Path) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as scratch:
        given, result = Path(scratch) / "workload.json", Path(scratch) / "starts.json"
        rows = [[int(j.job_id), int(j.submit_s), j.num_gpus, int(j.duration_s)] for j in jobs]
        given.write_text(json.dumps({"gpus": gpus, "jobs": rows}))
        command = [str(python), "-W", "ignore", str(DRIVER), str(given), str(result)]
        subprocess.run(command, check=True, capture_output=True, cwd=scratch, env={**os.environ, "TZ": "UTC"})
        found: dict[str, dict[str, float]] = json.loads(result.read_text())
        return found


def _waits(starts: dict[str, float], submitted: dict[str, float]) -> dict[str, float]:
    waits = sorted(start - submitted[n] for n, start in starts.items())
    return {"mean_wait_s": round(report.mean(waits), 1), "p99_wait_s": report.quantile(waits, 0.99), "max_wait_s": waits[-1]}


if __name__ == "__main__":
    sys.exit(main())
