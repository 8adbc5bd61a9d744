"""All policies over all traces, with the tables: ``python -m benchmarks.scheduler.campaign philly|mix|estimates``.

A run that is in the result file already is not done again: stop and go on as you like; ``--again`` starts over. ``--jobs 2`` simulates two
cases at a time.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.scheduler.simulation import policies, report, synthetic, tables, trace
from benchmarks.scheduler.simulation.model_estimates import ModelEstimates
from benchmarks.scheduler_sim import cluster
from engine.scheduler.pools import Pool
from engine.scheduler.simulation.cluster_simulation import Simulation
from engine.scheduler.simulation.simulated_job import SimulatedJob

HERE = Path(__file__).parents[1]
PHILLY_GPUS = 144
MIX_GPUS = (216, 256, 320)
MIX_DAYS = 3.0
"""Of arrivals; every job is then run to its end. A full fine-tuning lasts one to two days: less would hardly see two of them meet."""
FIRST_SEED = 11
"""The rules' numbers were chosen with seeds 1, 2 and 101 to 106; tables show others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One simulation of a campaign."""

    group: str
    """Its table."""
    seed: int
    policy: str
    jobs: Sequence[SimulatedJob]
    pool: Pool
    error: float = 1.0
    estimates: str = "given"
    """``given`` durations with `error`, those of the cost ``model``, or these corrected by ``history`` (`model_estimates`)."""

    @property
    def key(self) -> str:
        return f"{self.group} / seed {self.seed} / {self.policy}"


def philly(args: argparse.Namespace) -> Iterator[Case]:
    jobs = trace.read(args.trace, num_gpus=PHILLY_GPUS)
    for group, placement, names, error in (
        ("nodes of 8", "node", policies.NAMES, 1.0),
        ("GPUs only counted", "count", policies.NAMES, 1.0),
        ("nodes of 8, estimates off by up to 2", "node", ("ours", "easy", "shortest-first"), 2.0),
        ("nodes of 8, estimates off by up to 5", "node", ("ours", "easy", "shortest-first"), 5.0),
    ):
        for name in names:
            pool = cluster(PHILLY_GPUS, placement=placement)
            yield Case(group=group, seed=0, policy=name, jobs=jobs, pool=pool, error=error)


def mix(args: argparse.Namespace) -> Iterator[Case]:
    for premium, told in (("share", "a tenth of the jobs premium"), ("rules", "70B and full only premium")):
        for seed in range(FIRST_SEED, FIRST_SEED + args.seeds):
            jobs = synthetic.planned_mix(seed, days=args.days, premium=premium)
            for gpus in MIX_GPUS:
                for name in policies.NAMES:
                    yield Case(group=f"{gpus} GPUs, {told}", seed=seed, policy=name, jobs=jobs, pool=cluster(gpus))


def estimates(args: argparse.Namespace) -> Iterator[Case]:
    """The planned mix and the Philly trace with estimates that the platform would make."""
    for gpus in (MIX_GPUS[0], PHILLY_GPUS, *MIX_GPUS[1:]):
        for source, told in (("history", "corrected by history"), ("model", "the cost model alone")):
            for seed in range(FIRST_SEED, FIRST_SEED + args.seeds):
                name, jobs = f"mix on {gpus} GPUs", synthetic.planned_mix(seed, days=args.days, premium="share")
                if gpus == PHILLY_GPUS:
                    name, jobs = f"Philly on {gpus} GPUs", trace.read(args.trace, num_gpus=gpus)
                for policy in ("ours", "easy", "shortest-first"):
                    yield Case(group=f"{name}, {told}", seed=seed, policy=policy, jobs=jobs, pool=cluster(gpus), estimates=source)


CAMPAIGNS = {"philly": philly, "mix": mix, "estimates": estimates}


def summed_up(case: Case) -> tuple[str, dict[str, Any]]:
    """The case's key and its numbers."""
    began = time.process_time()
    exact = case.error == 1.0 and case.estimates == "given"
    knows_time = case.policy == "ours" or not exact  # with exact estimates nothing changes for the others between events
    made = None if case.estimates == "given" else ModelEstimates(case.jobs, seed=case.seed, history=case.estimates == "history")
    simulation = Simulation(
        case.jobs,
        [case.pool],
        policies.named(case.policy),
        estimate_error=case.error,
        estimates=made,
        seed=case.seed,
        tick_s=900.0 if knows_time else 0.0,
    )
    outcome = simulation.run()
    error = {"estimate_error": report.estimate_error(outcome)} if made else {}
    return case.key, {**report.detailed(outcome), **error, "cpu_s": round(time.process_time() - began, 2)}


def all_of(cases: Sequence[Case], processes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each case's key and numbers, in order."""
    if processes == 1:
        yield from map(summed_up, cases)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap(summed_up, cases)


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments().parse_args(argv)
    path = args.out / f"scheduler_{args.campaign}_202611.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() and not (args.again or args.quick) else {}
    every = list(CAMPAIGNS[args.campaign](args))
    if args.quick:
        every = [case for case in every if (case.group, case.seed) == (every[0].group, every[0].seed)]
    for key, one in all_of([case for case in every if case.key not in found], args.jobs):
        found[key] = one
        if not args.quick:
            _write(path, as_json(found))
        print(_line(key, one), flush=True)
    found = {case.key: found[case.key] for case in every} | found  # in their order
    if args.quick:
        print(page(args.campaign, found))
        return 0
    _write(path, as_json(found))
    _write(path.with_suffix(".md"), page(args.campaign, found))
    return 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("campaign", choices=CAMPAIGNS)
    parser.add_argument("--trace", type=Path, default=Path("../shared/data/traces/philly_vc_ee9e8c.csv"))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--days", type=float, default=MIX_DAYS, help="of arrivals of the mix")
    parser.add_argument("--jobs", type=int, choices=range(1, 65), default=1, metavar="N", help="simulations at once, each in a process")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--again", action="store_true", help="do all runs again; a second call without it goes on where that stopped")
    parser.add_argument("--quick", action="store_true", help="the first table with one seed; it is printed, nothing is written")
    return parser


def as_json(found: Mapping[str, Any]) -> str:
    """A line for each run."""
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(one)}" for key, one in found.items()) + "\n}\n"


def _write(path: Path, text: str) -> None:
    """The whole file or the one before: a run that is stopped here is gone on with later."""
    beside = path.with_name(f".{path.name}")
    beside.write_text(text)
    beside.replace(path)


def _line(key: str, one: Mapping[str, Any]) -> str:
    times = f"{one['avg_completion_s'] / 3600:.2f} h, longest wait {one['max_wait_s'] / 3600:.1f} h"
    promises = f"broken {one['broken_reservations']}, slipped {one['slipped_reservations']}"
    return f"{key}: {times}, premium late {one['premium_late']}, {promises}, {one['cpu_s']} s"


NOTES = {
    "estimates": """\
Jobs and their true durations are those of `scheduler_mix_202611.md` (a tenth premium) and `scheduler_philly_202611.md`; there the policies
know them. Here they know what the platform would: the cost model's time, wrong for each kind of job (base model, class and width) by one
of the ratios of `estimates_202611.md` that chose no constant (0.86 to 1.73), and for each run by a lognormal error of 0.2 besides
(`benchmarks/scheduler/simulation/model_estimates.py`). Corrected by history, it learns from the jobs that ended before. Running jobs
are expected to end by their pace. All three policies get the same estimates.
""",
}


def page(campaign: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    """The tables of a campaign; over several seeds means, and the worst of what is a bound."""
    groups: dict[str, dict[str, dict[str, Mapping[str, Any]]]] = {}
    for key, one in found.items():
        group, seed, policy = key.split(" / ")
        groups.setdefault(group, {}).setdefault(policy, {})[seed] = one
    command = f"python -m benchmarks.scheduler.campaign {campaign}"
    parts = [f"# Scheduling: {campaign}\n\nMade by `{command}`, with the rules as they ship. Waits are all stays in the queue together.\n"]
    parts += [NOTES[campaign]] if campaign in NOTES else []
    for group, by_policy in groups.items():
        seeds = max(len(runs) for runs in by_policy.values())
        over = ""
        if seeds > 1:
            over = f"\n\nMeans over {seeds} seeds; longest waits, broken reservations and late premium jobs: of all."
        merged_runs = {name: merged(list(by_policy[name].values())) for name in policies.NAMES if name in by_policy}
        parts.append(f"## {group}{over}\n\n{tables.of(merged_runs)}\n\n{ratios(by_policy)}\n")
    return "\n".join(parts)


def ratios(by_policy: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Ours over another policy, seed by seed: a largest wait of several seeds hides where ours is worse, and so does a mean."""
    if not all(name in by_policy for name in ("ours", "easy", "shortest-first")):
        return ""
    seeds = [seed for seed in by_policy["ours"] if all(seed in by_policy[name] for name in ("easy", "shortest-first"))]
    rows = []
    for title, key, other in COMPARED:
        found = [_ratio(by_policy["ours"][seed][key], by_policy[other][seed][key]) for seed in seeds]
        rows.append([title, *(f"{one:.3f}" for one in (report.mean(found), max(found), *found))])
    return tables.markdown(["", "mean", "worst", *seeds], rows)


def _ratio(ours: float, other: float) -> float:
    return ours / other if other else 1.0 if ours == other else math.inf


COMPARED = (
    ("longest wait of ours over that of EASY", "max_wait_s", "easy"),
    ("average completion of ours over that of shortest-first", "avg_completion_s", "shortest-first"),
)


WORST = ("max_wait_s", "max_first_wait_s", "fairness_worst", "most_preemptions_of_a_job", "premium_max_first_wait_s")
SUMMED = ("broken_reservations", "premium_late", "slipped_reservations", "jobs", "premium_jobs")


def merged(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several runs as one: the largest of what is a bound, the sum of what should be none, the mean of all else."""
    one: dict[str, Any] = {}
    for name in runs[0]:
        values = [run[name] for run in runs if name in run]
        if isinstance(values[0], Mapping):
            inner = {key for value in values for key in value}
            one[name] = {key: merged([v[key] for v in values if key in v]) for key in sorted(inner)}
        else:
            one[name] = max(values) if name in WORST else sum(values) if name in SUMMED else report.mean(values)
    return one


if __name__ == "__main__":
    sys.exit(main())
