"""Retry policy of both clients: when a request is sent again, and after how long."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx

MAX_RETRIES = 2
BACKOFF_S = 0.5
"""Delay before the first retry; doubles with each further retry."""
MAX_BACKOFF_S = 8.0
MAX_RETRY_AFTER_S = 60.0
"""Longest delay that a server may ask for; if it asks for more, the error is raised at once."""
NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
"""Failures that occur before the request reaches the server."""


def retry_pause(
    outcome: httpx.Response | httpx.TransportError,
    *,
    repeatable: bool,
    retry: int,
    backoff_s: float = BACKOFF_S,
    jitter: Callable[[], float] = random.random,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> float | None:
    """Returns the delay in seconds before the request is sent again, or None if it is not. `retry` counts from 0.

    1. A request that was never sent is retried.
    2. If the connection fails afterwards, only a `repeatable` request is retried, because the server may have processed it.
    3. ``x-should-retry: false`` prevents a retry; ``true`` makes any error retryable.
    4. 429 and 408 are retried: the server did nothing.
    5. 5xx, and errors with ``x-should-retry: true``, are retried if the request is `repeatable`.
    6. The delay is the one in ``retry-after-ms`` or ``retry-after``; if that exceeds a minute, there is no retry. Without either header the
       delay doubles from `backoff_s` to 8 s, minus up to a quarter of random jitter.
    """
    backoff: float = min(backoff_s * 2**retry, MAX_BACKOFF_S) * (1 - jitter() / 4)
    if isinstance(outcome, httpx.TransportError):
        return backoff if repeatable or isinstance(outcome, NOT_SENT) else None
    if not _may_pass(outcome, repeatable=repeatable):
        return None
    asked_s = retry_after_s(outcome.headers, now=now)
    if asked_s is None:
        return backoff
    return asked_s if asked_s <= MAX_RETRY_AFTER_S else None


def _may_pass(answer: httpx.Response, *, repeatable: bool) -> bool:
    told = answer.headers.get("x-should-retry")
    if answer.is_success or told == "false":
        return False
    if answer.status_code in (408, 429):
        return True
    return repeatable and (told == "true" or answer.status_code >= 500)


def retry_after_s(headers: Mapping[str, str], *, now: Callable[[], datetime]) -> float | None:
    """Returns the delay that the server asks for (milliseconds, seconds or a date), or None if the header is absent or malformed."""
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            return max(0.0, float(headers[name]) * unit_s)
        except (KeyError, ValueError):
            continue
    try:
        until = parsedate_to_datetime(headers.get("retry-after", ""))
    except (ValueError, OverflowError, TypeError):  # a date with an absurd UTC offset overflows
        return None
    return max(0.0, (until if until.tzinfo else until.replace(tzinfo=UTC)).timestamp() - now().timestamp())


def pause(seconds: float) -> None:
    time.sleep(seconds)


async def async_pause(seconds: float) -> None:
    import anyio  # installed with httpx; works with asyncio and trio

    await anyio.sleep(seconds)
