"""Quotas: whether a tenant's next job fits its limits, and what happens when a cap is reached.

Pure: a snapshot in, a decision with its reason out. GPU time counts by calendar months in UTC, in GPU-seconds:

1. *Used*: time within the month of ended attempts that were not refunded, and of running ones, of trainings and evaluations. Waiting and
   preparation use nothing.
2. *Held*: what admitted jobs are still expected to use, their evaluation included, from admission until they have ended or are paused by
   the cap. A trained job holds what its evaluation takes.
3. A job is admitted if used plus held plus its own expected time stays within the hard cap.
4. Use above the soft limit is billed as overage.
5. Once used time reaches the hard cap, running jobs are paused at their next checkpoint and queued jobs wait. A trained job is evaluated
   all the same: the time for it was held.
6. A job paused by rule 5 resumes when the rest of it fits again; one whose rest exceeds the whole cap resumes when nothing else is used or
   held in the month.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal, NamedTuple

from control_plane.tenants.rules import Tenant, tier_named
from engine.scheduler import LARGE_MODEL_PARAMETERS

HOUR_S = 3600.0
THRESHOLDS = (80, 100)
"""Percentages of the soft limit and of the hard cap at which a tenant is notified; at the first there is still time to act."""
HARD_CAP_REACHED = "hard_cap_reached"
"""Reason of a job paused by rule 5, and code of its event."""
ON_HARD_CAP = (
    "When the GPU time used this month reaches the hard cap, running jobs are paused at their next checkpoint and queued jobs wait; "
    "no work is lost. They resume automatically when the cap is raised or the next month (UTC) begins."
)
NO_HARD_CAP = "There is no hard cap: jobs keep running, and use above the soft limit is billed as overage."
SLACK_S = 1e-6
"""Tolerance of comparisons: sums of floating-point seconds."""


class Month(NamedTuple):
    """A calendar month in UTC."""

    name: str
    """``yyyy-mm``."""
    begins: datetime
    ends: datetime


def month_of(now: datetime) -> Month:
    """Return the month of `now`."""
    at = now.astimezone(UTC)
    begins = datetime(at.year, at.month, 1, tzinfo=UTC)
    ends = datetime(at.year + at.month // 12, at.month % 12 + 1, 1, tzinfo=UTC)
    return Month(name=f"{at:%Y-%m}", begins=begins, ends=ends)


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """GPU-seconds of a tenant in a month."""

    settled_s: float = 0.0
    """GPU-seconds of ended attempts."""
    running_s: float = 0.0
    held_s: float = 0.0

    @property
    def used_s(self) -> float:
        return self.settled_s + self.running_s

    @property
    def committed_s(self) -> float:
        """GPU-seconds used, or held by admitted jobs."""
        return self.used_s + self.held_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """A tenant's current use. Read it under the lock of the tenant's row; otherwise two submissions could count the same room."""

    jobs_in_flight: int
    standing: Standing = Standing()


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """What a submission requests, as far as limits are concerned."""

    tier: str
    full_parameters: bool = False
    num_parameters: int = 0
    """Parameters of the base model."""
    gpu_seconds: float = 0.0
    """Expected GPU-seconds."""


class Refusal(NamedTuple):
    code: str
    detail: str
    left_s: float | None = None
    """GPU-seconds left under the hard cap, if they are too few."""


class Threshold(NamedTuple):
    """A reached share of a limit."""

    limit: Literal["soft", "hard"]
    percent: int
    gpu_hours: float
    """The full limit."""


def admit(tenant: Tenant, usage: Usage, ask: Ask) -> Refusal | None:
    """Return None if the job may enter, else the reason. Rules in order:

    1. A job runs in its tenant's tier or a lower one.
    2. Full-parameter training and 70B-class models need a tier that includes them.
    3. Jobs in flight stay within the tenant's limit.
    4. Expected GPU time stays within the hard cap (:func:`fits`).
    """
    tiers = ("free", "standard", "premium")
    if tiers.index(tier_named(ask.tier).name) > tiers.index(tier_named(tenant.tier).name):
        return Refusal("tier_not_allowed", f"tier {ask.tier} is above the tenant's tier {tenant.tier}; ask for {tenant.tier} or less")
    may_train_full = tier_named(ask.tier).may_train_full
    if ask.full_parameters and not may_train_full:
        return Refusal("tier_not_allowed", f"full-parameter training is not part of tier {ask.tier}; use method lora, or tier premium")
    if ask.num_parameters >= LARGE_MODEL_PARAMETERS and not may_train_full:
        size = f"{ask.num_parameters / 1e9:.0f}B"
        return Refusal(
            "tier_not_allowed",
            f"a model of {size} parameters is not part of tier {ask.tier}, whose limit is {LARGE_MODEL_PARAMETERS / 1e9:.0f}B; "
            "choose a smaller model, or tier premium",
        )
    if usage.jobs_in_flight >= tenant.max_jobs_in_flight:
        return Refusal(
            "exceeded_quota",
            f"{usage.jobs_in_flight} jobs are in flight and the limit of tenant {tenant.id} is {tenant.max_jobs_in_flight}; "
            "wait until one ends, or cancel one",
        )
    return fits(tenant, usage.standing, ask.gpu_seconds)


def fits(tenant: Tenant, standing: Standing, gpu_seconds: float) -> Refusal | None:
    """Return None if the hard cap has room for `gpu_seconds` on top of what is used and held."""
    cap = tenant.hard_gpu_hours
    if cap is None or standing.committed_s + gpu_seconds <= cap * HOUR_S + SLACK_S:
        return None
    onward = (
        f"wait for jobs that hold time to end or cancel one, ask your operator for a higher cap than tier {tenant.tier} has, or submit "
        "again next month (UTC)"
        if gpu_seconds <= cap * HOUR_S
        else "train fewer epochs or fewer rows, choose a smaller model, or ask your operator for a higher cap"
    )
    return Refusal(
        "exceeded_quota",
        f"the job is expected to take {hours(gpu_seconds)} GPU-hours; of the {cap:g} that tenant {tenant.id} has this month "
        f"{hours(standing.used_s)} are used and {hours(standing.held_s)} held by jobs that were admitted. Next: {onward}",
        left_s=left_s(tenant, standing),
    )


def left_s(tenant: Tenant, standing: Standing) -> float | None:
    """Return what the hard cap leaves for further jobs; None if there is no cap."""
    return None if tenant.hard_gpu_hours is None else max(0.0, tenant.hard_gpu_hours * HOUR_S - standing.committed_s)


def overage_s(tenant: Tenant, standing: Standing, gpu_seconds: float) -> float:
    """Return how much of a job of `gpu_seconds` exceeds the soft limit, counting everything held as used."""
    if tenant.soft_gpu_hours is None:
        return 0.0
    within = max(0.0, tenant.soft_gpu_hours * HOUR_S - standing.committed_s)
    return max(0.0, gpu_seconds - within)


def at_cap(tenant: Tenant, standing: Standing) -> bool:
    """Rule 5: whether used time has reached the hard cap; held time does not count."""
    return tenant.hard_gpu_hours is not None and standing.used_s >= tenant.hard_gpu_hours * HOUR_S - SLACK_S


def may_go_on(tenant: Tenant, standing: Standing, rest_s: float) -> Refusal | None:
    """Rule 6, for a job with `rest_s` GPU-seconds left."""
    refusal = fits(tenant, standing, rest_s)
    cap = tenant.hard_gpu_hours
    alone = cap is not None and cap > 0 and standing.committed_s <= SLACK_S and rest_s > cap * HOUR_S
    return None if alone else refusal


def reached(tenant: Tenant, standing: Standing) -> Iterator[Threshold]:
    """Return the shares of the limits that used time has reached, smallest first."""
    for limit, gpu_hours in (("soft", tenant.soft_gpu_hours), ("hard", tenant.hard_gpu_hours)):
        for percent in THRESHOLDS:
            if gpu_hours and standing.used_s >= gpu_hours * HOUR_S * percent / 100 - SLACK_S:
                yield Threshold("soft" if limit == "soft" else "hard", percent, gpu_hours)


def promised_start(tier: str, created_at: datetime) -> datetime | None:
    """Return when a job of this tier is promised to start; None: best effort."""
    within = tier_named(tier).starts_within_s
    return None if within is None else created_at + timedelta(seconds=within)


def hours(gpu_seconds: float) -> str:
    """Format GPU-hours for people; a short job does not show as 0."""
    return f"{gpu_seconds / HOUR_S:.4g}"
