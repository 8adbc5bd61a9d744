"""Limits on requests, counted in this process's memory.

- Requests per minute of each key, and unknown keys per minute of each address. An API of several processes allows that many times the
  limit: no call waits for a shared counter.
- Long-running work in dedicated threads: each tenant has a share of them and cannot use them all.

What a tenant may *have* (jobs, GPU-hours) is counted in the database, exactly.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import TypeVar

import anyio
import anyio.to_thread
from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ft_assets.errors import RateLimited, Unauthenticated, Unavailable

MAX_BUCKETS = 20_000
"""Above this, full buckets are dropped, which changes nothing, then those nearest to full; 100 bytes each."""
UNKNOWN_KEYS_PER_MINUTE = 600
"""Per address. A secret of 256 bits cannot be guessed; this bounds what guessing costs: ten look-ups per second, 1 % of a core."""
OPERATORS_PER_MINUTE = 1200
MAX_KNOWN = 20_000
"""Keys that recently worked: an address misused by others stays open to them."""
IPV6_SITE_BITS = 64
"""What a provider assigns to one customer; its addresses count as one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Take:
    """One request counted against a bucket."""

    allowed: bool
    limit: int
    remaining: int
    reset_s: float
    """Seconds until the bucket is full again."""
    retry_after_s: float
    """Seconds to wait; 0 if the request was allowed."""


class Buckets:
    """Token buckets that hold a minute's requests and refill evenly; thread-safe.

    Stores only the time at which a bucket is full again: full buckets need no memory.
    """

    def __init__(self, *, clock: Callable[[], float], max_buckets: int = MAX_BUCKETS) -> None:
        self._clock, self._max, self._lock = clock, max_buckets, threading.Lock()
        self._full_at: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._full_at)

    def take(self, name: str, per_minute: int) -> Take:
        """Take one token of the bucket `name`, which holds `per_minute`."""
        return self._take(name, per_minute, cost=1)

    def look(self, name: str, per_minute: int) -> Take:
        """Whether a token is available; takes none."""
        return self._take(name, per_minute, cost=0)

    def _take(self, name: str, per_minute: int, *, cost: int) -> Take:
        every_s = 60.0 / per_minute
        with self._lock:
            now = self._clock()
            full_at = max(self._full_at.get(name, now), now)
            after = full_at + every_s
            wait_s = after - now - 60.0
            allowed = wait_s <= 1e-9
            if allowed and cost:
                full_at = self._full_at[name] = after
                if len(self._full_at) > self._max:
                    self._shrink(now)
        remaining = max(0, math.floor((60.0 - (full_at - now)) / every_s + 1e-6))
        retry_after_s = 0.0 if allowed else wait_s
        return Take(allowed=allowed, limit=per_minute, remaining=remaining, reset_s=full_at - now, retry_after_s=retry_after_s)

    def _shrink(self, now: float) -> None:
        """Drop full buckets, then the fullest, down to three quarters, so that the next calls need not sweep again."""
        kept = sorted(((at, name) for name, at in self._full_at.items() if at > now), reverse=True)
        self._full_at = {name: at for at, name in kept[: self._max * 3 // 4]}


class RateLimits:
    """The limits of one API process."""

    of_operators = OPERATORS_PER_MINUTE

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, unknown_keys_per_minute: int = UNKNOWN_KEYS_PER_MINUTE) -> None:
        self.keys = Buckets(clock=clock)
        self.addresses = Buckets(clock=clock)
        self._unknown_per_minute = unknown_keys_per_minute
        self._known: dict[bytes, None] = {}

    def count(self, request: Request, key_id: str, per_minute: int) -> None:
        """Count one request of a key; ``RateLimited`` beyond its limit. The response headers show how many are left."""
        taken = self.keys.take(key_id, per_minute)
        request.state.rate_limit = taken
        if not taken.allowed:
            raise RateLimited(
                f"the key {key_id} may send {per_minute} requests a minute; send this one again in {max(0.001, taken.retry_after_s):.3f} "
                "s, poll less often, or follow the stream of events"
            )

    @contextmanager
    def watching_unknown_keys(self, request: Request, secret: str) -> Iterator[None]:
        """Wraps the look-up of a key: an address that sent too many unknown keys is refused without one."""
        mark, address = hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest(), site_of(client_of(request))
        if mark not in self._known:
            seen = self.addresses.look(address, self._unknown_per_minute)
            if not seen.allowed:
                request.state.rate_limit = seen
                raise RateLimited(
                    f"this address sent {self._unknown_per_minute} unknown keys within a minute; correct the key, then send the request "
                    f"again in {math.ceil(seen.retry_after_s)} s",
                    code="too_many_unknown_keys",
                )
        try:
            yield
        except Unauthenticated:
            self._known.pop(mark, None)
            self.addresses.take(address, self._unknown_per_minute)
            raise
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[mark] = None


def client_of(request: Request) -> str | None:
    """Return the caller's address; behind a proxy that uvicorn trusts, the one that the proxy reports."""
    return request.client.host if request.client else None


def site_of(address: str | None) -> str:
    """Return what counts as one address."""
    try:
        parsed = ip_address(address or "")
    except ValueError:
        return address or "unknown"
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is None:
        return str(int(parsed) >> (128 - IPV6_SITE_BITS))
    return str(parsed)


def headers_of(taken: Take) -> list[tuple[bytes, bytes]]:
    """Return OpenAI's headers for `taken`; a refusal says when to retry, in seconds and in milliseconds."""
    found = {
        "x-ratelimit-limit-requests": str(taken.limit),
        "x-ratelimit-remaining-requests": str(taken.remaining),
        "x-ratelimit-reset-requests": _span(taken.reset_s),
    }
    if not taken.allowed:
        found["retry-after"] = str(max(1, math.ceil(taken.retry_after_s)))
        found["retry-after-ms"] = str(max(1, math.ceil(taken.retry_after_s * 1000)))
    return [(name.encode(), value.encode()) for name, value in found.items()]


def _span(s: float) -> str:
    """Format like OpenAI: ``20ms``, ``6.5s``."""
    return f"{math.ceil(s * 1000)}ms" if s < 1 else f"{s:.3f}".rstrip("0").rstrip(".") + "s"


class RateLimitHeaders:
    """Adds the rate limit headers to every response, including refusals, streams and errors."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start" and (taken := state.get("rate_limit")) is not None:
                message["headers"] = [*message.get("headers", ()), *headers_of(taken)]
            await send(message)

        await self.app(scope, receive, send_with_limits)


_T = TypeVar("_T")


class TenantLimiter:
    """Runs at most so many at once, and so many per tenant; a wait longer than `wait_s` is refused with ``uploads_busy``.

    Per process, on the event loop that created it.
    """

    def __init__(self, *, total: int, each: int, wait_s: float) -> None:
        self._total, self._each, self._wait_s = anyio.CapacityLimiter(total), each, wait_s
        self._threads = anyio.CapacityLimiter(total)
        self._of: dict[str, anyio.CapacityLimiter] = {}
        self._users: Counter[str] = Counter()

    async def run(self, tenant: str, work: Callable[[], _T]) -> _T:
        """Run `work` in a thread when it is the tenant's turn; returns its result."""
        async with self._turn(tenant):
            return await anyio.to_thread.run_sync(work, limiter=self._threads)

    @asynccontextmanager
    async def _turn(self, tenant: str) -> AsyncIterator[None]:
        share = self._of.setdefault(tenant, anyio.CapacityLimiter(self._each))
        self._users[tenant] += 1
        me = object()
        held: list[anyio.CapacityLimiter] = []
        try:
            with anyio.move_on_after(self._wait_s) as waiting:
                for limiter in (share, self._total):
                    await limiter.acquire_on_behalf_of(me)
                    held.append(limiter)
            if waiting.cancelled_caught:
                raise Unavailable(
                    f"no turn to store the body came within {self._wait_s:g} s; {self._each} bodies of a tenant are stored at once, and "
                    f"{self._total.total_tokens:g} of all: send fewer at once, and this one again",
                    code="uploads_busy",
                )
            yield
        finally:
            for limiter in held:
                limiter.release_on_behalf_of(me)
            self._users[tenant] -= 1
            if not self._users[tenant]:
                del self._users[tenant], self._of[tenant]


class JoinLimiter:
    """Joins of uploads: at most `each` uploads per tenant at once, and for each of them one call that joins and one that waits.

    Further calls are refused at once with ``upload_completing``: waiting is up to the client, and costs no thread.
    """

    def __init__(self, *, total: int, each: int) -> None:
        self._total, self._each = total, each
        self._threads = anyio.CapacityLimiter(total)
        self._calls: dict[str, Counter[str]] = {}

    async def run(self, tenant: str, upload_id: str, join: Callable[[], _T]) -> _T:
        """Run `join` in a thread; there is no await between counting and starting, so the counts are exact."""
        mine = self._calls.get(tenant, Counter())
        if mine[upload_id] >= 2:
            raise Unavailable(f"upload {upload_id} is being completed by other calls; send this one again", code="upload_completing")
        if (upload_id not in mine and len(mine) >= self._each) or sum(c.total() for c in self._calls.values()) >= self._total:
            raise Unavailable(
                f"{len(mine)} of your uploads are being completed (limit {self._each} per tenant, {self._total} in all); "
                f"send this one for {upload_id} again",
                code="upload_completing",
            )
        self._calls[tenant] = mine
        mine[upload_id] += 1
        try:
            return await anyio.to_thread.run_sync(join, limiter=self._threads)
        finally:
            mine[upload_id] -= 1
            mine += Counter()  # drops tenants at 0
            if not mine:
                del self._calls[tenant]
