"""Notifications: event types, retry schedule, and the choice of deliveries. Pure.

Types are stable, and OpenAI's where it has one. The data of an event has the object's ``id`` and its new state, but no text that the tenant
uploaded: receivers fetch what they need with their own key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

EVENT_TYPES: Mapping[str, str] = {
    "fine_tuning.job.queued": "the job was admitted and waits for GPUs, also after a preemption",
    "fine_tuning.job.running": "training started or resumed",
    "fine_tuning.job.evaluating": "training is done; the adapter is being evaluated",
    "fine_tuning.job.paused": "the job was paused, by its tenant or because a cap was reached",
    "fine_tuning.job.preempted": "the job gave its GPUs to another job; it resumes from its checkpoint",
    "fine_tuning.job.succeeded": "the job succeeded",
    "fine_tuning.job.failed": "the job failed; its error states the reason",
    "fine_tuning.job.cancelled": "the job was cancelled",
    "file.processed": "a file was validated; its dataset version exists",
    "file.refused": "a file was refused; its report states the reason",
    "adapter.promoted": "an adapter was promoted to production",
    "adapter.quarantined": "an adapter failed its gates; it is kept but not served",
    "adapter.approval_pending": "an adapter awaits approval",
    "adapter.rolled_back": "an adapter was withdrawn from production in favour of the one before it",
    "adapter.deprecated": "an adapter is no longer served, and is deleted after its grace period",
    "quota.threshold_reached": "this month's GPU time has reached a threshold of a limit",
    "quota.hard_cap_reached": "the hard cap is reached: running jobs are paused at their next checkpoint",
    "budget.threshold_reached": "this month's spending has reached a threshold of a budget",
    "refund.decided": "an operator granted or refused a refund",
    "invoice.issued": "a month's invoice was issued",
    "webhook_endpoint.disabled": "an endpoint was disabled after failing for too long",
}
"""Meaning of each type."""

EVERY_TYPE = "*"
"""In an endpoint's list of types: all types, including those of later versions."""

DELAYS_S = (0, 5, 5 * 60, 30 * 60, 2 * 3600, 5 * 3600, 10 * 3600, 14 * 3600, 20 * 3600, 24 * 3600)
"""Seconds before each attempt since the previous one: the schedule of Standard Webhooks. A little over 3 days in all."""
JITTER = 0.1
"""Up to this share is added to a delay, so that deliveries that failed together are not retried together."""
LONGEST_RETRY_AFTER_S = 24 * 3600
"""A receiver's ``retry-after`` counts up to the longest delay of the schedule."""
DISABLED_AFTER = timedelta(days=5)
"""An endpoint without a success for this long is disabled: longer than all attempts of one event take."""
KEPT_FOR = timedelta(days=30)
"""How long events and their deliveries are kept; pending ones are kept until they end."""


def next_attempt(attempts: int, *, now: datetime, retry_after_s: float | None, chance: float) -> datetime | None:
    """Return when a delivery that has failed `attempts` times is retried; None after the last attempt.

    1. After the delay of the schedule, plus up to :data:`JITTER` of it, by `chance` in 0..1.
    2. Not before `retry_after_s`, as requested by the receiver, up to :data:`LONGEST_RETRY_AFTER_S`.
    """
    if attempts >= len(DELAYS_S):
        return None
    delay = DELAYS_S[attempts] * (1 + JITTER * chance)
    return now + timedelta(seconds=max(delay, min(retry_after_s or 0.0, LONGEST_RETRY_AFTER_S)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """A delivery that could be sent now."""

    id: str
    tenant: str
    target: str
    is_mail: bool
    failing: bool
    """Whether its endpoint's last answer was a failure."""
    due_since: datetime
    seq: int
    """Sequence number of the event."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """How many deliveries a dispatcher runs at once; separate shares keep hanging receivers from using all of them."""

    total: int
    failing: int
    """Share of failing endpoints; a hanging one belongs to them from its second delivery on."""
    mail: int
    """Share of mail: the mail server may hang, too."""


AT_ONCE_TO_ONE_TARGET = 2
AT_ONCE_FOR_ONE_TENANT = 4


def choose(due: Iterable[Due], *, on_the_way: Mapping[str, int], tenants_on_the_way: Mapping[str, int], slots: Slots) -> list[Due]:
    """Choose the deliveries to start now, given the number in progress by target and by tenant.

    1. Tenants take turns: the first of each before the second of any, starting with the tenant with the fewest in progress.
    2. At most :data:`AT_ONCE_TO_ONE_TARGET` per target, 1 if it is failing, and :data:`AT_ONCE_FOR_ONE_TENANT` per tenant.
    3. Within `slots`: failing endpoints and mail have their own shares.
    4. Longest due first, then the earlier event.
    """
    by_target, by_tenant = dict(on_the_way), dict(tenants_on_the_way)
    turns: list[tuple[int, Due]] = []
    for one in sorted(due, key=lambda d: (d.due_since, d.seq, d.id)):
        most = 1 if one.failing or one.is_mail else AT_ONCE_TO_ONE_TARGET
        if by_target.get(one.target, 0) >= most or by_tenant.get(one.tenant, 0) >= AT_ONCE_FOR_ONE_TENANT:
            continue
        by_target[one.target] = by_target.get(one.target, 0) + 1
        by_tenant[one.tenant] = by_tenant.get(one.tenant, 0) + 1
        turns.append((by_tenant[one.tenant], one))
    chosen: list[Due] = []
    left = {"failing": slots.failing, "mail": slots.mail}
    for _, one in sorted(turns, key=lambda t: (t[0], t[1].due_since, t[1].seq, t[1].id)):
        share = "mail" if one.is_mail else "failing" if one.failing else None
        if len(chosen) >= slots.total or (share and left[share] <= 0):
            continue
        if share:
            left[share] -= 1
        chosen.append(one)
    return chosen
