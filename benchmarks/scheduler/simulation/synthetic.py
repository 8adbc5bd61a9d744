"""Traces that are made: the mix that the platform is planned for, and others that differ from it and from each other on purpose."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

from control_plane.planning import job_mix, kind_sizes
from control_plane.planning.arrivals import arrival_times, submissions
from engine.scheduler.simulation.simulated_job import SimulatedJob

DAY, HOUR = 86400.0, 3600.0
MIX = job_mix.load()
"""500 jobs a day: 10.3 GPU-hours a job, 214 GPUs on average (``control_plane/planning/planned_mix.yaml``)."""


def planned_mix(seed: int, *, days: float = 7.0, premium: str = "rules") -> list[SimulatedJob]:
    """500 jobs a day as planned, most in working hours.

    `premium` ``rules``: LoRA of the 70B class and full fine-tuning are premium, as the tiers say: nine tenths of all GPU-hours;
    ``share``: a tenth of the jobs of every class is premium, as if every tier could train everything.
    """
    kinds = kind_sizes.sized(MIX, ())
    if premium == "share":
        kinds = [replace(kind, tiers={tier: share / 100 for tier, share in MIX.tiers.items()}) for kind in kinds]
    return submissions(MIX, kinds, seed=seed, days=days)


def _tier(rng: random.Random) -> str:
    return rng.choices(tuple(MIX.tiers), tuple(MIX.tiers.values()))[0]


def heavy_tail(seed: int) -> list[SimulatedJob]:
    """Lengths over five orders of magnitude (Pareto, 1.1), mostly narrow, at about 0.95 of 128 GPUs."""
    rng = random.Random(f"heavy-{seed}")
    return _loaded(
        rng,
        128,
        0.95,
        1200,
        lambda: min(20 * DAY, 600 * rng.paretovariate(1.1)),
        lambda: rng.choices((1, 2, 4, 8, 16), (50, 10, 20, 15, 5))[0],
    )


def bursts(seed: int) -> list[SimulatedJob]:
    """Sweeps: 40 to 120 jobs of a kind at the same minute, quiet between, at about 0.8 of 128 GPUs."""
    rng = random.Random(f"bursts-{seed}")
    jobs: list[SimulatedJob] = []
    now = 0.0
    while len(jobs) < 1500:
        width, length, many = rng.choice((1, 1, 2, 4, 8)), rng.lognormvariate(math.log(2 * HOUR), 1.0), rng.randint(40, 120)
        tenant = f"tenant-{rng.randrange(12)}"
        made = [(now + rng.uniform(0, 60), width, length * rng.lognormvariate(0, 0.2)) for _ in range(many)]
        jobs += [_job(len(jobs) + i, submit, width, duration, tenant=tenant) for i, (submit, width, duration) in enumerate(made)]
        now += rng.expovariate(1.0) * sum(w * d for _, w, d in made) / (0.8 * 128)
    return jobs


def wide_gangs(seed: int) -> list[SimulatedJob]:
    """Half of the jobs take one to four whole nodes, at about 0.85 of 128 GPUs."""
    rng = random.Random(f"wide-{seed}")
    return _loaded(
        rng,
        128,
        0.85,
        1000,
        lambda: rng.lognormvariate(math.log(2 * HOUR), 1.2),
        lambda: rng.choices((1, 2, 4, 8, 16, 32), (20, 15, 15, 20, 20, 10))[0],
    )


def single_gpus(seed: int) -> list[SimulatedJob]:
    """One GPU each, at about 0.95 of 64 GPUs."""
    rng = random.Random(f"single-{seed}")
    return _loaded(rng, 64, 0.95, 2000, lambda: rng.lognormvariate(math.log(HOUR), 1.6), lambda: 1)


def light(seed: int) -> list[SimulatedJob]:
    """A third of 128 GPUs: hardly anybody waits under any policy."""
    rng = random.Random(f"light-{seed}")
    return _loaded(
        rng,
        128,
        0.35,
        1000,
        lambda: rng.lognormvariate(math.log(2 * HOUR), 1.2),
        lambda: rng.choices((1, 2, 4, 8, 16), (40, 20, 20, 15, 5))[0],
    )


def overload(seed: int) -> list[SimulatedJob]:
    """A quarter more is asked for than 128 GPUs can do, for as long as jobs come."""
    rng = random.Random(f"over-{seed}")
    return _loaded(
        rng,
        128,
        1.25,
        1500,
        lambda: rng.lognormvariate(math.log(2 * HOUR), 1.2),
        lambda: rng.choices((1, 2, 4, 8, 16, 32), (40, 15, 20, 17, 6, 2))[0],
    )


def diurnal(seed: int) -> list[SimulatedJob]:
    """Days and nights: over capacity in working hours, 0.85 of 128 GPUs on average."""
    rng = random.Random(f"day-{seed}")
    lengths = [rng.lognormvariate(math.log(1.5 * HOUR), 1.2) for _ in range(1500)]
    widths = [rng.choices((1, 2, 4, 8, 16), (40, 15, 20, 20, 5))[0] for _ in lengths]
    days = sum(w * s for w, s in zip(widths, lengths, strict=True)) / (0.85 * 128 * DAY)
    times = arrival_times(MIX, rng, mean=len(lengths), length_s=days * DAY)[: len(lengths)]
    return [_job(i, t, w, s, tenant=f"tenant-{rng.randrange(12)}") for i, (t, w, s) in enumerate(zip(times, widths, lengths, strict=False))]


def three_tiers(seed: int) -> list[SimulatedJob]:
    """As ``diurnal``, with a tenth premium and a third free jobs: tiers under load."""
    rng = random.Random(f"tiers-{seed}")
    made = []
    for job in diurnal(seed + 1000):
        tier = _tier(rng)
        made.append(_job(int(job.job_id), job.submit_s, job.num_gpus, job.duration_s, tenant=f"{tier}-{rng.randrange(6)}", tier=tier))
    return made


MADE: dict[str, tuple[Callable[[int], list[SimulatedJob]], int]] = {
    "heavy-tail": (heavy_tail, 128),
    "bursts": (bursts, 128),
    "wide-gangs": (wide_gangs, 128),
    "single-gpus": (single_gpus, 64),
    "light": (light, 128),
    "overload": (overload, 128),
    "diurnal": (diurnal, 128),
    "three-tiers": (three_tiers, 128),
}
"""Name, how it is made from a seed, GPUs that it is meant for."""


def _job(number: int, submit: float, num_gpus: int, duration: float, *, tenant: str, tier: str = "standard") -> SimulatedJob:
    return SimulatedJob(
        job_id=f"{number:05d}",
        submit_s=round(submit, 1),
        num_gpus=num_gpus,
        duration_s=round(max(60.0, duration), 1),
        tenant=tenant,
        tier=tier,
    )


def _loaded(
    rng: random.Random, gpus: int, load: float, count: int, length: Callable[[], float], width: Callable[[], int]
) -> list[SimulatedJob]:
    """`count` jobs of twelve tenants, Poisson arrivals, such that they ask for `load` of `gpus` while they come."""
    shapes = [(width(), length()) for _ in range(count)]
    gap = sum(w * s for w, s in shapes) / (load * gpus) / count
    now, jobs = 0.0, []
    for i, (w, s) in enumerate(shapes):
        now += rng.expovariate(1 / gap)
        jobs.append(_job(i, now, w, s, tenant=f"tenant-{rng.randrange(12)}"))
    return jobs
