"""Waits of a mix on given pools: the platform's own scheduling policy on simulated clusters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from control_plane.planning.arrivals import submissions
from control_plane.planning.job_mix import DAY_S, JobMix
from control_plane.planning.sized_kind import SizedKind
from control_plane.tenants.rules import TIERS, tier_named
from core.errors import InvalidRequest
from engine.scheduler import Outcome, Pool, Record, Simulation, quantile, schedule

LEAST_DAYS, WARM_UP_DAYS = 1.0, 3.0
"""Fewest days that are counted, and days before them, which begin with an empty cluster: the planned mix's longest jobs run for two to
three."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one simulation may take. The defaults are those of a command that runs for minutes."""

    days: float = 28.0
    """Days that are simulated if none are given, or fewer if these have too many jobs."""
    jobs: int = 40_000
    """Jobs that are submitted: a minute, at a millisecond for each."""
    gpus: int = 80_000
    """GPUs of all pools."""
    work: int = 30_000_000
    """Jobs and nodes that are considered, each counted in every round: 6 to 25 microseconds each. It bounds queues that grow."""


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
    days: float
    """Days that are counted."""
    complete: bool
    """False: the simulation reached its limit of work, and the days are fewer than requested or jobs were left."""
    not_started: int
    """Jobs that had not started then; they count as if they had started at that moment."""
    waits: tuple[Wait, ...]
    utilisation: float
    """GPUs in use, as a share, while the counted jobs were submitted."""
    preemptions: int
    most_preemptions: int
    """Of one job."""
    missed_reservations: int
    busy: tuple[tuple[float, int, int], ...]
    """Hours since the counted days began, GPUs in use, GPUs that waiting jobs request; on the hour."""


def days_within(limits: Limits, mix: JobMix, wanted: float | None) -> float | None:
    """Return the days to simulate: `wanted`, else as many of :attr:`Limits.days` as have few enough jobs; None if not one day has.

    ``InvalidRequest`` (``invalid_plan``) with the largest number if `wanted` are too many.
    """
    most = math.floor(10.0 * (limits.jobs / mix.jobs_a_day - WARM_UP_DAYS)) / 10.0
    if most < LEAST_DAYS:
        return None
    if wanted is not None and wanted > most:
        raise InvalidRequest(
            f"{wanted:g} days and {WARM_UP_DAYS:g} before them have {mix.jobs_a_day * (wanted + WARM_UP_DAYS):,.0f} jobs, more than the "
            f"{limits.jobs:,} of a simulation here; simulate at most {most:g} days",
            code="invalid_plan",
            param="days",
        )
    return min(limits.days, most) if wanted is None else wanted


def simulate(mix: JobMix, kinds: Sequence[SizedKind], pools: Sequence[Pool], *, days: float, seed: int, limits: Limits) -> Simulated | None:
    """Run the policy on jobs of `days`, with exact estimates, without failures of nodes; None if its limit of work ends it before a day.

    ``InvalidRequest`` (``invalid_plan``) if the days have no job.
    """
    jobs = submissions(mix, kinds, seed=seed, days=days + WARM_UP_DAYS)
    begin = WARM_UP_DAYS * DAY_S
    if not any(job.submit_s >= begin for job in jobs):
        raise InvalidRequest(f"no job is submitted in {days:g} days of this mix; simulate more days", code="invalid_plan", param="days")
    outcome = Simulation(jobs, pools, lambda snapshot, now: schedule(snapshot, now=now), seed=seed, max_work=limits.work).run()
    stop = math.inf if outcome.stopped_at is None else outcome.stopped_at
    end = min(begin + days * DAY_S, stop)
    counted = [r for r in outcome.records if begin <= r.job.submit_s <= end]
    if end < begin + LEAST_DAYS * DAY_S or not counted:
        return None
    waits = [
        (record, min(stop, math.inf if record.first_start is None else record.first_start) - record.job.submit_s) for record in counted
    ]
    return Simulated(
        days=(end - begin) / DAY_S, complete=outcome.stopped_at is None, not_started=sum(r.first_start is None for r in counted),
        waits=tuple(_waits(waits)), utilisation=_utilisation(outcome, begin, end),
        preemptions=sum(r.preemptions for r in counted), most_preemptions=max(r.preemptions for r in counted),
        missed_reservations=len(outcome.broken) + outcome.slipped, busy=_on_the_hour(outcome, begin, (end - begin) / DAY_S),
    )  # fmt: skip


def _waits(counted: Sequence[tuple[Record, float]]) -> Iterable[Wait]:
    """Yield the waits of each tier, premium first, then of each of its kinds if it has several."""
    for tier in reversed([*TIERS]):
        of_tier = [(r.job.kind, waited) for r, waited in counted if r.job.tier == tier]
        kinds = sorted({kind for kind, _ in of_tier})
        if of_tier:
            yield _wait(tier, None, [waited for _, waited in of_tier])
        if len(kinds) > 1:
            yield from (_wait(tier, kind, [waited for of, waited in of_tier if of == kind]) for kind in kinds)


def _wait(tier: str, kind: str | None, waited: Sequence[float]) -> Wait:
    waits, promised = sorted(waited), tier_named(tier).starts_within_s
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
