"""Streams: poll for news until the subject has ended or the key no longer works."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from control_plane.http.rate_limits import OpenCounts, TenantLimiter
from core.errors import FtError, QuotaExceeded

POLL_S = 0.5
KEEP_ALIVE_S = 15.0
"""Seconds without an event after which a comment is sent: proxies cut silent connections after 30 to 60."""
LOOK_AT_KEY_S = 15.0
MAX_LOOKING, MAX_LOOKING_OF_TENANT, LOOK_WAIT_S = 8, 2, 600.0
"""Threads shared by all streams, separate from the 40 that handle requests: streams of a tenant wait for each other."""
MAX_OF_KEY, MAX_OF_TENANT = 20, 100
"""Open streams per API process."""
NUMBER = re.compile(r"[0-9]{1,18}")

_T = TypeVar("_T")
_looking: RunVar[TenantLimiter] = RunVar("_looking")

News = tuple[Sequence[tuple[int, str]], bool]
"""Numbered events (JSON), and whether they are the last."""
Look = Callable[[int], News]
"""Returns the news after a given number."""
MAX_SHARED = 1000
"""Looks remembered before expired ones are forgotten."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Follower:
    """The caller that follows a stream."""

    caller: str
    """Id of the key or member."""
    tenant: str
    look_again: Callable[[], object]
    """Raises the error that a request with the same key would now get."""
    streams: OpenStreams


class OpenStreams:
    """Open streams of this process, by key and by tenant; counted by its event loop only."""

    def __init__(self, *, max_of_key: int = MAX_OF_KEY, max_of_tenant: int = MAX_OF_TENANT, look_at_key_s: float = LOOK_AT_KEY_S) -> None:
        self._max_of_key, self._max_of_tenant, self.look_at_key_s = max_of_key, max_of_tenant, look_at_key_s
        self._open, self._num_open = OpenCounts(), 0
        self.ending = False
        self._shared: dict[Hashable, _SharedLook] = {}

    async def look(self, tenant: str, key: Hashable, look: Callable[[], News]) -> News:
        """Return the result of `look`, or of one with the same `key` that began within ``POLL_S``: many pages of a job cost one look."""
        now = time.monotonic()
        shared = self._shared.get((tenant, key))
        if shared is None or now - shared.began_at >= POLL_S:
            if len(self._shared) >= MAX_SHARED:
                self._shared = {k: s for k, s in self._shared.items() if now - s.began_at < POLL_S}
            shared = self._shared[tenant, key] = _SharedLook(began_at=now)
            try:
                shared.news = await _in_thread(tenant, look)
            finally:
                shared.done.set()
                if shared.news is None:
                    self._shared.pop(key, None)  # failed or cancelled: the next stream looks itself
            return shared.news
        await shared.done.wait()
        return shared.news if shared.news is not None else await _in_thread(tenant, look)

    def __len__(self) -> int:
        return self._num_open

    def end(self) -> None:
        """Cut all streams within ``POLL_S``, because this process ends: their clients reconnect to another one."""
        self.ending = True

    @contextmanager
    def one_of(self, follower: Follower) -> Iterator[None]:
        """Count a stream; ``QuotaExceeded`` (``too_many_streams``) beyond a limit."""
        limits = ((f"key {follower.caller}", self._max_of_key), (f"tenant {follower.tenant}", self._max_of_tenant))
        with self._open.counted(limits, _too_many):
            self._num_open += 1
            try:
                yield
            finally:
                self._num_open -= 1


def _too_many(owner: str, limit: int) -> QuotaExceeded:
    what = f"the {owner} has {limit} open streams, the limit; close one, or read without stream or follow"
    return QuotaExceeded(what, code="too_many_streams")


@dataclass(kw_only=True, slots=True)
class _SharedLook:
    began_at: float
    done: anyio.Event = field(default_factory=anyio.Event)
    news: News | None = None


class _Cut(Exception):
    """The stream's key no longer works, or the process ends."""


class Stream(StreamingResponse):
    """A streaming response that is counted while open, and cut when its key stops working or the process ends; reconnecting shows why."""

    def __init__(self, content: AsyncIterator[str | bytes], follower: Follower, *, media_type: str) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(_while_open(content, follower), media_type=media_type, headers=headers)
        self._follower = follower

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._follower.streams.one_of(self._follower):
            try:
                await super().__call__(scope, receive, send)
            except _Cut:
                return  # cut without an end, so that clients do not take it for the whole


def server_sent(look: Look, follower: Follower, since: int = 0, *, subject: str | None = None) -> StreamingResponse:
    """Return a response that streams the events after `since`, then ``[DONE]``.

    `subject`: what the events are of, if `look` returns the same to every stream of the tenant; None if it remembers its reader.
    """

    async def news(after: int) -> News:
        if subject is None:
            return await _in_thread(follower.tenant, partial(look, after))
        return await follower.streams.look(follower.tenant, (subject, after), partial(look, after))

    return Stream(_follow(news, since), follower, media_type="text/event-stream")


def last_seen(last_event_id: str | None) -> int:
    """Return the number in a ``Last-Event-ID`` header; 0, the beginning, for anything else."""
    return int(last_event_id) if last_event_id and NUMBER.fullmatch(last_event_id) else 0


async def _follow(news: Callable[[int], Awaitable[News]], since: int) -> AsyncIterator[str]:
    silent_s = 0.0
    while True:
        events, over = await news(since)
        for number, data in events:
            since, silent_s = number, 0.0
            yield f"id: {number}\ndata: {data}\n\n"
        if over and not events:
            yield "data: [DONE]\n\n"
            return
        if events:
            continue
        yield ""
        await anyio.sleep(POLL_S)
        silent_s += POLL_S
        if silent_s >= KEEP_ALIVE_S:
            silent_s = 0.0
            yield ": waiting\n\n"


def text_as_it_comes(look: Callable[[], tuple[bytes, bool]], follower: Follower) -> StreamingResponse:
    """Return a response that streams the text that `look` finds, until it reports the end. Silent while nothing is new."""
    return Stream(_text(look, follower.tenant), follower, media_type="text/plain; charset=utf-8")


async def _text(look: Callable[[], tuple[bytes, bool]], tenant: str) -> AsyncIterator[bytes]:
    while True:
        data, over = await _in_thread(tenant, look)
        yield data
        if over:
            return
        await anyio.sleep(POLL_S)


async def _while_open(content: AsyncIterator[str | bytes], follower: Follower) -> AsyncIterator[str | bytes]:
    """Yield from `content` while the key works; it yields empty chunks when it has found nothing new."""
    looked_at = time.monotonic()
    async for piece in content:
        if piece:
            yield piece
        if follower.streams.ending:
            raise _Cut
        if time.monotonic() - looked_at >= follower.streams.look_at_key_s:
            try:
                await _in_thread(follower.tenant, follower.look_again)
            except FtError as error:
                raise _Cut from error
            looked_at = time.monotonic()


async def _in_thread(tenant: str, call: Callable[[], _T]) -> _T:
    return await _limiter().run(tenant, call)


def _limiter() -> TenantLimiter:
    try:
        return _looking.get()
    except LookupError:
        made = TenantLimiter(
            total=MAX_LOOKING, each=MAX_LOOKING_OF_TENANT, wait_s=LOOK_WAIT_S, what="looks of streams", code="too_many_streams"
        )
        _looking.set(made)
        return made
