"""Notifications: the retry schedule. Pure.

The data of an event (``core.event_types``) has the object's ``id`` and its new state, but no text that the tenant uploaded: receivers fetch
what they need with their own key.
"""

from __future__ import annotations

from datetime import datetime, timedelta

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
