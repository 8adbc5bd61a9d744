"""Notifications: event types and the retry schedule. Pure.

Types are stable, and OpenAI's where it has one. The data of an event has the object's ``id`` and its new state, but no text that the tenant
uploaded: receivers fetch what they need with their own key.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    "adapter.quarantined": "a model was trained and is not approved: it did not pass its gate; it is kept but not served",
    "adapter.released": "a model that did not pass its gate was released by a person",
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
TRIED_BEFORE_DISABLED = 4
"""Attempts of a delivery, over half an hour, before its failure can disable an endpoint, which may have been sent nothing for weeks."""
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
