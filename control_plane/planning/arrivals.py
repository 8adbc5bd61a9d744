"""Jobs of a mix as they are submitted over days, drawn by a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from control_plane.planning.job_mix import DAY_S, JobMix
from control_plane.planning.rules import SPREAD
from control_plane.planning.sized_kind import SizedKind
from engine.scheduler import RESERVED_FOR, SimulatedJob

TENANTS = 40
"""Tenants of each tier that submit in one week. Their sizes follow Zipf's law: the largest submits nearly a quarter of the tier's jobs."""
LEAST_S = 60.0
"""No job is shorter."""


def submissions(mix: JobMix, kinds: Sequence[SizedKind], *, seed: int, days: float) -> list[SimulatedJob]:
    """Return the jobs of `days`, by time of submission.

    Arrivals are a Poisson process with the mix's rate over the day; lengths are lognormal around the mean of their kind. A job is named by
    its number and kind: ``00012``.
    """
    rng = random.Random(f"mix-{seed}")
    weights = [1 / (i + 1) for i in range(TENANTS)]
    jobs = []
    for i, submit in enumerate(arrival_times(mix, rng, mean=mix.jobs_a_day * days, length_s=days * DAY_S)):
        kind = rng.choices(kinds, [k.share for k in kinds])[0]
        width = rng.choice(kind.gpus)
        duration = kind.gpu_hours * 3600.0 / width * rng.lognormvariate(-(SPREAD**2) / 2, SPREAD)
        names = tuple(kind.tiers)
        tier = names[0] if len(names) == 1 else rng.choices(names, tuple(kind.tiers.values()))[0]
        tenant = f"{tier}-{rng.choices(range(TENANTS), weights)[0]}"
        spot = tier != RESERVED_FOR and rng.random() < mix.spot / 100
        jobs.append(
            SimulatedJob(
                job_id=f"{i:05d}", submit_s=round(submit, 1), num_gpus=width, duration_s=round(max(LEAST_S, duration), 1), tenant=tenant,
                tier=tier, job_class=kind.job_class, spot=spot, kind=kind.name,
            )
        )  # fmt: skip
    return jobs


def arrival_times(mix: JobMix, rng: random.Random, *, mean: float, length_s: float) -> list[float]:
    """Return the seconds at which jobs are submitted, from midnight of the first day on: `mean` jobs in `length_s`, at the mix's rates."""
    rate, highest = mix.rate(), mix.highest_rate
    at_most, now = highest * mean / length_s, 0.0
    times: list[float] = []
    while True:
        now += rng.expovariate(at_most)
        if now >= length_s:
            return times
        if rng.random() < rate(now) / highest:
            times.append(now)
