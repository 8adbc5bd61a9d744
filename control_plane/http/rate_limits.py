"""Limits on requests.

- Requests per minute of each key, and unknown keys per minute of each address, counted in the database: all API processes together admit
  the limit.
- Long-running work in dedicated threads: each tenant has a share of a process's threads and cannot use them all.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from ipaddress import IPv6Address, ip_address
from typing import TypeVar

import anyio
import anyio.to_thread
import sqlalchemy as sa
from fastapi import Request
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Engine
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from control_plane.http.tables import rate_limits
from control_plane.platform.context import Platform
from core.errors import FtError, RateLimited, Unauthenticated, Unavailable

UNKNOWN_KEYS_PER_MINUTE = 600
"""Per address. A secret of 256 bits cannot be guessed; this bounds what guessing costs: ten look-ups per second, 1 % of a core."""
OPERATORS_PER_MINUTE = 1200
MAX_KNOWN = 20_000
"""Keys that recently worked: an address misused by others stays open to them."""
IPV6_SITE_BITS = 64
"""What a provider assigns to one customer; its addresses count as one."""
SWEEP_EVERY = 1000
"""Requests of a process between two deletions of full buckets, which need no row."""


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
    """Token buckets that hold a minute's requests and refill evenly, shared by all processes of a database.

    A row is the time at which a bucket is full again (the generic cell rate algorithm), so that one UPSERT refills, tests and takes.
    The table is unlogged: a take waits for no disk, and a crash of the database fills all buckets.
    """

    def __init__(self, engine: Engine, *, clock: Callable[[], float] | None = None) -> None:
        """`clock` returns seconds; None: the database's clock, the same for all processes."""
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        now = _DATABASE_NOW if clock is None else sa.bindparam("now", callable_=clock, type_=sa.Double)
        name, every_s, full_at = sa.bindparam("bucket", type_=sa.Text), sa.bindparam("every_s", type_=sa.Double), rate_limits.c.full_at
        after = sa.func.greatest(full_at, now) + every_s
        # Built once: building them takes longer than executing them.
        self._upsert = insert(rate_limits).values(name=name, full_at=now + every_s).on_conflict_do_update(
            index_elements=["name"], set_={"full_at": after}, where=after - now <= 60.0 + 1e-6
        ).returning(full_at - now)  # fmt: skip
        self._select = sa.select(full_at - now).where(rate_limits.c.name == name)
        full = sa.select(rate_limits.c.name).where(full_at <= now).with_for_update(skip_locked=True)
        self._sweep = rate_limits.delete().where(rate_limits.c.name.in_(full))
        self._takes = 0

    def take(self, name: str, per_minute: int) -> Take:
        """Take one token of the bucket `name`, which holds `per_minute`."""
        with self._engine.connect() as conn:
            full_in_s = conn.execute(self._upsert, {"bucket": name, "every_s": 60.0 / per_minute}).scalar()
            self._takes += 1
            if self._takes % SWEEP_EVERY == 0:
                conn.execute(self._sweep)
        if full_in_s is None:
            return replace(self.look(name, per_minute), allowed=False)
        return _take(full_in_s, per_minute, allowed=True)

    def look(self, name: str, per_minute: int) -> Take:
        """Whether a token is available; takes none."""
        with self._engine.connect() as conn:
            found = conn.execute(self._select, {"bucket": name}).scalar()
        full_in_s = max(found or 0.0, 0.0)
        return _take(full_in_s, per_minute, allowed=full_in_s + 60.0 / per_minute <= 60.0 + 1e-6)


_DATABASE_NOW: sa.ColumnElement[float] = sa.cast(sa.extract("epoch", sa.func.statement_timestamp()), sa.Double)


def _take(full_in_s: float, per_minute: int, *, allowed: bool) -> Take:
    every_s = 60.0 / per_minute
    return Take(
        allowed=allowed, limit=per_minute, remaining=max(0, math.floor((60.0 - full_in_s) / every_s + 1e-6)), reset_s=full_in_s,
        retry_after_s=0.0 if allowed else max(0.0, full_in_s + every_s - 60.0),
    )  # fmt: skip


class RateLimits:
    """The limits of an API; its processes share the buckets of keys and of addresses."""

    of_operators = OPERATORS_PER_MINUTE

    def __init__(self, platform: Platform, *, unknown_keys_per_minute: int = UNKNOWN_KEYS_PER_MINUTE) -> None:
        self._platform = platform
        self._unknown_per_minute = unknown_keys_per_minute
        self._known: dict[bytes, str] = {}

    @cached_property
    def buckets(self) -> Buckets:
        return Buckets(self._platform.logins.platform)

    def count(self, request: Request, key_id: str, per_minute: int) -> None:
        """Count one request of a key; ``RateLimited`` beyond its limit. The response headers show how many are left."""
        taken = self.buckets.take(key_id, per_minute)
        request.state.rate_limit = taken
        if not taken.allowed:
            raise RateLimited(
                f"the key {key_id} may send {per_minute} requests a minute; send this one again in {max(0.001, taken.retry_after_s):.3f} "
                "s, poll less often, or follow the stream of events"
            )

    def knows(self, secret: str) -> bool:
        """Whether this secret worked when it was last looked up, a while ago."""
        return _mark(secret) in self._known

    def remember(self, secret: str, owner: str = "") -> None:
        """Record that a secret works, and whose it is if that is known."""
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[_mark(secret)] = owner or self._known.get(_mark(secret), "") or _mark(secret).hex()

    def owner_of(self, request: HTTPConnection, secret: str) -> str:
        """Return the same text for all requests of a tenant or an operator whose keys worked before, and for all others of an address."""
        return self._known.get(_mark(secret)) or f"address:{site_of(client_of(request))}"

    @contextmanager
    def watching_unknown_keys(self, request: HTTPConnection, secret: str, *, unknown: type[FtError] = Unauthenticated) -> Iterator[None]:
        """Wraps the look-up of a key, which raises `unknown`: an address that sent too many unknown keys is refused without one."""
        address = f"address:{site_of(client_of(request))}"
        if not self.knows(secret):
            seen = self.buckets.look(address, self._unknown_per_minute)
            if not seen.allowed:
                request.state.rate_limit = seen
                raise RateLimited(
                    f"this address sent {self._unknown_per_minute} unknown keys within a minute; correct the key, then send the request "
                    f"again in {math.ceil(seen.retry_after_s)} s",
                    code="too_many_unknown_keys",
                )
        try:
            yield
        except unknown:
            self._known.pop(_mark(secret), None)
            self.buckets.take(address, self._unknown_per_minute)
            raise
        self.remember(secret)


def _mark(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def client_of(request: HTTPConnection) -> str | None:
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


class OpenCounts:
    """What is open at once in one API process, by key and by tenant; counted by its event loop only."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()

    def __getitem__(self, owner: str) -> int:
        return self._open[owner]

    @contextmanager
    def counted(self, limits: Sequence[tuple[str, int]], refusal: Callable[[str, int], FtError], *, number: int = 1) -> Iterator[None]:
        """Count `number` for each owner in `limits`; raise the `refusal` of the first owner that would have more than its limit."""
        for owner, limit in limits:
            if self._open[owner] + number > limit:
                raise refusal(owner, limit)
        counted = {owner: number for owner, _ in limits}
        self._open.update(counted)
        try:
            yield
        finally:
            self._open.subtract(counted)
            self._open = +self._open


class TenantLimiter:
    """Runs at most so many at once, and so many per tenant; a wait longer than `wait_s` is refused with `code`: a wait for the tenant's own
    others with 429, a wait for those of all tenants with 503.

    Per process, on the event loop that created it.
    """

    def __init__(self, *, total: int, each: int, wait_s: float, what: str = "uploads", code: str = "uploads_busy") -> None:
        self._total, self._each, self._wait_s = anyio.CapacityLimiter(total), each, wait_s
        self._what, self._code = what, code
        self._threads = anyio.CapacityLimiter(total)
        self._of: dict[str, anyio.CapacityLimiter] = {}
        self._users: Counter[str] = Counter()

    async def run(self, tenant: str, work: Callable[[], _T]) -> _T:
        """Run `work` in a thread when it is the tenant's turn; returns its result."""
        async with self.turn(tenant):
            return await anyio.to_thread.run_sync(work, limiter=self._threads)

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Hold one of the tenant's places, in the order of asking."""
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
                all_are_taken = held and self._total.available_tokens < 1  # else the tenant's place came as the wait ended
                raise (Unavailable if all_are_taken else RateLimited)(
                    f"not accepted within {self._wait_s:g} s: at most {self._each} {self._what} per tenant and "
                    f"{self._total.total_tokens:g} in total are handled concurrently; send fewer in parallel and retry",
                    code=self._code,
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
