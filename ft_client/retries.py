"""Retry policy of the client: when a call is sent again, and after how long. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx

MAX_RETRIES = 2
BACKOFF_S = 0.5
"""Seconds before the first retry; doubled before each further one."""
MAX_BACKOFF_S = 8.0
MAX_RETRY_AFTER_S = 60.0
"""Longest ``retry-after`` that is honored; beyond it, the error is raised at once."""
NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
"""Failures after which the server cannot have seen the request."""


def retry_pause(
    outcome: httpx.Response | httpx.TransportError,
    *,
    repeatable: bool,
    retry: int,
    backoff_s: float = BACKOFF_S,
    jitter: Callable[[], float] = random.random,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> float | None:
    """Returns the seconds until the call is sent again; None if it is not. `retry` counts from 0, the first.

    1. A request that was never sent is sent again.
    2. A connection that broke afterwards: only if the call is `repeatable`, because the server may have done it.
    3. ``x-should-retry: false`` is obeyed; ``true`` marks any failure as transient.
    4. 429 and 408 are sent again: nothing was done.
    5. 5xx, or what ``x-should-retry`` requests: only if the call is `repeatable`.
    6. A time given by the server (``retry-after-ms``, ``retry-after``) is used, unless it is longer than a minute: then the error is
       raised. Otherwise the pause doubles from `backoff_s` to 8 s, minus up to a quarter at random.
    """
    backoff: float = min(backoff_s * 2**retry, MAX_BACKOFF_S) * (1 - jitter() / 4)
    if isinstance(outcome, httpx.TransportError):
        return backoff if repeatable or isinstance(outcome, NOT_SENT) else None
    if not _may_pass(outcome, repeatable=repeatable):
        return None
    requested_s = retry_after_s(outcome.headers, now=now)
    if requested_s is None:
        return backoff
    return requested_s if requested_s <= MAX_RETRY_AFTER_S else None


def _may_pass(answer: httpx.Response, *, repeatable: bool) -> bool:
    reported = answer.headers.get("x-should-retry")
    if answer.is_success or reported == "false":
        return False
    if answer.status_code in (408, 429):
        return True
    return repeatable and (reported == "true" or answer.status_code >= 500)


def retry_after_s(headers: Mapping[str, str], *, now: Callable[[], datetime]) -> float | None:
    """Returns the server's pause, in milliseconds, in seconds or as a date; None if it gives none, or an unknown format."""
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            return max(0.0, float(headers[name]) * unit_s)
        except (KeyError, ValueError):
            continue
    try:
        until = parsedate_to_datetime(headers.get("retry-after", ""))
    except (ValueError, OverflowError, TypeError):  # an offset of a million years is not valid
        return None
    return max(0.0, (until if until.tzinfo else until.replace(tzinfo=UTC)).timestamp() - now().timestamp())
