"""When metrics are sent to Weights & Biases, and when sending is given up."""

from __future__ import annotations

from datetime import datetime, timedelta

EVERY = timedelta(seconds=15)
"""Between two requests for a job that trains: W&B's own client sends every 15 s by default (``transmit_interval``)."""
MAX_PAUSE = timedelta(minutes=30)
GIVE_UP_AFTER = timedelta(hours=24)
"""Longer than an outage of W&B, and long enough to replace a key that was revoked."""


def next_attempt(failing_since: datetime, now: datetime) -> datetime | None:
    """When to try again after a failure; None if it is given up.

    1. A day after the first failure in a row, sending is given up.
    2. Each pause is as long as it has been failing, so pauses double, from :data:`EVERY` up to :data:`MAX_PAUSE`.
    """
    failing_for = now - failing_since
    if failing_for >= GIVE_UP_AFTER:
        return None
    return now + min(MAX_PAUSE, max(EVERY, failing_for))
