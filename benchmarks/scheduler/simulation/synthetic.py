"""Traces that are made: the mix that the platform is planned for, and others that differ from it and from each other on purpose."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from benchmarks.scheduler.simulation.trace import Job

DAY, HOUR = 86400.0, 3600.0
JOBS_A_DAY = 500
MIX: tuple[tuple[float, str, tuple[int, ...], float], ...] = (
    (0.70, "lora", (1,), 0.5),
    (0.20, "lora", (1, 2, 4), 4.0),
    (0.09, "large", (8,), 16.0),
    (0.01, "full", (16, 32), 768.0),
)
"""Share of the jobs, class, widths (each as likely), mean GPU-hours: small and medium LoRA, LoRA of the 70B class, all parameters. Together
10.3 GPU-hours a job, 5,150 a day, 215 GPUs on average."""
SPREAD = 0.5
"""Sigma of the lognormal length around the mean: half of the jobs of a kind are within 0.7 and 1.4 times their median."""
TENANTS = 40
"""That submit in one week. Their sizes follow Zipf's law, so that the largest submits a tenth of all jobs or more."""
PREMIUM_SHARE = 0.10
"""Of adapters below the 70B class: those of premium tenants. The other classes are premium by the tier's rules."""
FREE_SHARE = 0.30


def planned_mix(seed: int, *, days: float = 7.0, premium: str = "rules") -> list[Job]:
    """500 jobs a day as planned, most in working hours.

    `premium` ``rules``: LoRA of the 70B class and full fine-tuning are premium, as the tiers say: nine tenths of all GPU-hours;
    ``share``: a tenth of the jobs of every class is premium, as if every tier could train everything.
    """
    rng = random.Random(f"mix-{seed}")
    weights = [1 / (i + 1) for i in range(TENANTS)]
    jobs = []
    for i, submit in enumerate(_diurnal(rng, JOBS_A_DAY * days, days * DAY)):
        _, kind, widths, gpu_hours = rng.choices(MIX, [m[0] for m in MIX])[0]
        width = rng.choice(widths)
        duration = gpu_hours * HOUR / width * rng.lognormvariate(-(SPREAD**2) / 2, SPREAD)
        tier = "premium" if premium == "rules" and kind != "lora" else _tier(rng)
        tenant = f"{tier}-{rng.choices(range(TENANTS), weights)[0]}"
        spot = tier != "premium" and rng.random() < 0.3
        jobs.append(_job(i, submit, width, duration, tenant=tenant, tier=tier, job_class=kind, spot=spot))
    return jobs


def _tier(rng: random.Random) -> str:
    return rng.choices(("premium", "standard", "free"), (PREMIUM_SHARE, 1 - PREMIUM_SHARE - FREE_SHARE, FREE_SHARE))[0]


def heavy_tail(seed: int) -> list[Job]:
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


def bursts(seed: int) -> list[Job]:
    """Sweeps: 40 to 120 jobs of a kind at the same minute, quiet between, at about 0.8 of 128 GPUs."""
    rng = random.Random(f"bursts-{seed}")
    jobs: list[Job] = []
    now = 0.0
    while len(jobs) < 1500:
        width, length, many = rng.choice((1, 1, 2, 4, 8)), rng.lognormvariate(math.log(2 * HOUR), 1.0), rng.randint(40, 120)
        tenant = f"tenant-{rng.randrange(12)}"
        made = [(now + rng.uniform(0, 60), width, length * rng.lognormvariate(0, 0.2)) for _ in range(many)]
        jobs += [_job(len(jobs) + i, submit, width, duration, tenant=tenant) for i, (submit, width, duration) in enumerate(made)]
        now += rng.expovariate(1.0) * sum(w * d for _, w, d in made) / (0.8 * 128)
    return jobs


def wide_gangs(seed: int) -> list[Job]:
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


def single_gpus(seed: int) -> list[Job]:
    """One GPU each, at about 0.95 of 64 GPUs."""
    rng = random.Random(f"single-{seed}")
    return _loaded(rng, 64, 0.95, 2000, lambda: rng.lognormvariate(math.log(HOUR), 1.6), lambda: 1)


def light(seed: int) -> list[Job]:
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


def overload(seed: int) -> list[Job]:
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


def diurnal(seed: int) -> list[Job]:
    """Days and nights: over capacity in working hours, 0.85 of 128 GPUs on average."""
    rng = random.Random(f"day-{seed}")
    lengths = [rng.lognormvariate(math.log(1.5 * HOUR), 1.2) for _ in range(1500)]
    widths = [rng.choices((1, 2, 4, 8, 16), (40, 15, 20, 20, 5))[0] for _ in lengths]
    days = sum(w * s for w, s in zip(widths, lengths, strict=True)) / (0.85 * 128 * DAY)
    times = _diurnal(rng, len(lengths), days * DAY)[: len(lengths)]
    return [_job(i, t, w, s, tenant=f"tenant-{rng.randrange(12)}") for i, (t, w, s) in enumerate(zip(times, widths, lengths, strict=False))]


def three_tiers(seed: int) -> list[Job]:
    """As ``diurnal``, with a tenth premium and a third free jobs: tiers under load."""
    rng = random.Random(f"tiers-{seed}")
    made = []
    for job in diurnal(seed + 1000):
        tier = _tier(rng)
        made.append(_job(int(job.job_id), job.submit_s, job.num_gpus, job.duration_s, tenant=f"{tier}-{rng.randrange(6)}", tier=tier))
    return made


MADE: dict[str, tuple[Callable[[int], list[Job]], int]] = {
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


def _job(
    number: int,
    submit: float,
    num_gpus: int,
    duration: float,
    *,
    tenant: str = "tenant",
    tier: str = "standard",
    job_class: str = "lora",
    spot: bool = False,
) -> Job:
    return Job(
        job_id=f"{number:05d}",
        submit_s=round(submit, 1),
        num_gpus=num_gpus,
        duration_s=round(max(60.0, duration), 1),
        tenant=tenant,
        tier=tier,
        job_class=job_class,
        spot=spot,
    )


def _loaded(rng: random.Random, gpus: int, load: float, count: int, length: Callable[[], float], width: Callable[[], int]) -> list[Job]:
    """`count` jobs of twelve tenants, Poisson arrivals, such that they ask for `load` of `gpus` while they come."""
    shapes = [(width(), length()) for _ in range(count)]
    gap = sum(w * s for w, s in shapes) / (load * gpus) / count
    now, jobs = 0.0, []
    for i, (w, s) in enumerate(shapes):
        now += rng.expovariate(1 / gap)
        jobs.append(_job(i, now, w, s, tenant=f"tenant-{rng.randrange(12)}"))
    return jobs


def _diurnal(rng: random.Random, mean: float, length: float) -> list[float]:
    """Poisson arrivals, `mean` of them over `length` seconds, most of them in the afternoon: the rate swings by 0.8 around its mean."""
    rate, now = 1.8 * mean / length, 0.0
    times: list[float] = []
    while True:
        now += rng.expovariate(rate)
        if now >= length:
            return times
        if rng.random() < (1 - 0.8 * math.cos(2 * math.pi * now / DAY)) / 1.8:
            times.append(now)
