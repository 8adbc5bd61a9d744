"""Waits of a mix on given pools: the platform's own scheduling policy on simulated clusters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from control_plane.capacity.pools import Pool
from control_plane.planning.arrivals import submissions
from control_plane.planning.job_mix import DAY_S, JobMix
from control_plane.planning.sized_kind import SizedKind
from control_plane.queue.scheduler import schedule
from control_plane.queue.simulation.cluster_simulation import Simulation
from control_plane.queue.simulation.outcome import Outcome, Record, quantile
from control_plane.tenants.rules import TIERS, tier_named
from ft_assets.errors import InvalidRequest

WARM_UP_DAYS = 3.0
"""Days before the ones that are counted: they begin with an empty cluster, and the planned mix's longest jobs run for two to three."""
MAX_JOBS = 40_000
"""Default limit of jobs in one simulation: a minute, at a millisecond for each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Seconds from submission to start, of the jobs of a tier."""

    tier: str
    kind: str | None
    """Of one kind of the mix; None: of all."""
    jobs: int
    p50_s: float
    p95_s: float
    max_s: float
    promised_s: float | None
    """The start that the tier promises."""
    within: float | None
    """Share of the jobs that start within it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    waits: tuple[Wait, ...]
    utilisation: float
    """GPUs in use, as a share, while the counted jobs were submitted."""
    preemptions: int
    most_preemptions: int
    """Of one job."""
    missed_reservations: int
    busy: tuple[tuple[float, int, int], ...]
    """Hours since the counted days began, GPUs in use, GPUs that waiting jobs request; on the hour."""


def simulate(
    mix: JobMix, kinds: Sequence[SizedKind], pools: Sequence[Pool], *, days: float, seed: int, max_jobs: int = MAX_JOBS
) -> Simulated:
    """Run the policy on jobs of `days`, with exact estimates, without failures of nodes.

    ``InvalidRequest`` (``invalid_plan``) if the days have too many jobs to simulate, or too few to say anything.
    """
    expected = mix.jobs_a_day * (days + WARM_UP_DAYS)
    if expected > max_jobs:
        raise InvalidRequest(
            f"{days:g} days and {WARM_UP_DAYS:g} before them have {expected:,.0f} jobs, and a simulation takes at most {max_jobs:,} here; "
            "simulate fewer days",
            code="invalid_plan",
            param="days",
        )
    jobs = submissions(mix, kinds, seed=seed, days=days + WARM_UP_DAYS)
    begin = WARM_UP_DAYS * DAY_S
    if not any(job.submit_s >= begin for job in jobs):
        raise InvalidRequest(f"no job is submitted in {days:g} days of this mix; simulate more days", code="invalid_plan", param="days")
    outcome = Simulation(jobs, pools, lambda snapshot, now: schedule(snapshot, now=now), seed=seed).run()
    counted = [r for r in outcome.records if r.job.submit_s >= begin]
    hours = _on_the_hour(outcome, begin, days)
    return Simulated(
        waits=tuple(_waits(counted)), utilisation=_utilisation(outcome, begin, begin + days * DAY_S),
        preemptions=sum(r.preemptions for r in counted), most_preemptions=max(r.preemptions for r in counted),
        missed_reservations=len(outcome.broken) + outcome.slipped, busy=hours,
    )  # fmt: skip


def _waits(records: Sequence[Record]) -> Iterable[Wait]:
    """Yield the waits of each tier, premium first, then of each of its kinds if it has several."""
    for tier in reversed([*TIERS]):
        of_tier = [r for r in records if r.job.tier == tier]
        kinds = list(dict.fromkeys(r.job.kind for r in of_tier))
        if of_tier:
            yield _wait(tier, None, of_tier)
        if len(kinds) > 1:
            yield from (_wait(tier, kind, [r for r in of_tier if r.job.kind == kind]) for kind in sorted(kinds))


def _wait(tier: str, kind: str | None, records: Sequence[Record]) -> Wait:
    waits, promised = sorted(r.first_wait_s for r in records), tier_named(tier).starts_within_s
    return Wait(
        tier=tier, kind=kind, jobs=len(waits), p50_s=quantile(waits, 0.5), p95_s=quantile(waits, 0.95), max_s=waits[-1],
        promised_s=promised, within=None if promised is None else sum(wait <= promised for wait in waits) / len(waits),
    )  # fmt: skip


def _utilisation(outcome: Outcome, begin: float, end: float) -> float:
    ends = [*(span.start for span in outcome.spans[1:]), end]
    used = sum(span.used * max(0.0, min(until, end) - max(span.start, begin)) for span, until in zip(outcome.spans, ends, strict=True))
    return used / ((end - begin) * outcome.num_gpus)


def _on_the_hour(outcome: Outcome, begin: float, days: float) -> tuple[tuple[float, int, int], ...]:
    found, at = list[tuple[float, int, int]](), 0
    for hour in range(int(days * 24) + 1):
        while at + 1 < len(outcome.spans) and outcome.spans[at + 1].start <= begin + hour * 3600.0:
            at += 1
        found.append((float(hour), outcome.spans[at].used, outcome.spans[at].queued))
    return tuple(found)
