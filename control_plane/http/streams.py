"""Streams: what is new, as often as it is looked for, until the subject has come to its end or the key that opened it to its own."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ft_assets.errors import FtError, QuotaExceeded

POLL_S = 0.5
KEEP_ALIVE_S = 15.0
"""Seconds without an event after which a comment is sent: proxies cut silent connections after 30 to 60."""
LOOK_AT_KEY_S = 15.0
MAX_LOOKING = 8
"""Threads of all streams together, none of the 40 that answer requests: who follows much waits for others who do."""
MAX_OF_KEY, MAX_OF_TENANT = 20, 100
"""Streams that are open at once in one process of the API."""
NUMBER = re.compile(r"[0-9]{1,18}")

_T = TypeVar("_T")
_looking: RunVar[anyio.CapacityLimiter] = RunVar("_looking")

Look = Callable[[int], tuple[Sequence[tuple[int, str]], bool]]
"""From the number of the last event sent to the numbered events (JSON) behind it, and whether none can follow these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Follower:
    """Who follows a stream."""

    key_id: str
    tenant: str
    look_again: Callable[[], object]
    """Raises what a request with the same key would now be refused with."""
    streams: OpenStreams


class OpenStreams:
    """How many streams are open in this process, by key and by tenant; only its event loop counts."""

    def __init__(self, *, max_of_key: int = MAX_OF_KEY, max_of_tenant: int = MAX_OF_TENANT, look_at_key_s: float = LOOK_AT_KEY_S) -> None:
        self._max_of_key, self._max_of_tenant, self.look_at_key_s = max_of_key, max_of_tenant, look_at_key_s
        self._open: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(self._open.values()) // 2

    @contextmanager
    def one_of(self, follower: Follower) -> Iterator[None]:
        """Count one; ``QuotaExceeded`` (``too_many_streams``) beyond a limit."""
        limits = ((f"key {follower.key_id}", self._max_of_key), (f"tenant {follower.tenant}", self._max_of_tenant))
        for whose, limit in limits:
            if self._open[whose] >= limit:
                raise QuotaExceeded(
                    f"the {whose} has {limit} open streams, the limit; close one, or read without stream or follow", code="too_many_streams"
                )
        self._open.update(whose for whose, _ in limits)
        try:
            yield
        finally:
            self._open.subtract(whose for whose, _ in limits)
            self._open = +self._open


class _KeyEnded(Exception):
    """The stream's key opens nothing any more."""


class Stream(StreamingResponse):
    """An answer that is counted while it is open, and cut off when its key has ended: who takes it up again is told why."""

    def __init__(self, content: AsyncIterator[str | bytes], follower: Follower, *, media_type: str) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(_while_open(content, follower), media_type=media_type, headers=headers)
        self._follower = follower

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._follower.streams.one_of(self._follower):
            try:
                await super().__call__(scope, receive, send)
            except _KeyEnded:
                return  # without an end: the server cuts the connection, and nobody takes what came for all there is


def server_sent(look: Look, follower: Follower, since: int = 0) -> StreamingResponse:
    """An answer that streams the events behind number `since`, then ``[DONE]``."""
    return Stream(_follow(look, since), follower, media_type="text/event-stream")


def last_seen(last_event_id: str | None) -> int:
    """The number in a ``Last-Event-ID`` header; 0, the beginning, for anything else."""
    return int(last_event_id) if last_event_id and NUMBER.fullmatch(last_event_id) else 0


async def _follow(look: Look, since: int) -> AsyncIterator[str]:
    silent_s = 0.0
    while True:
        events, over = await _in_thread(partial(look, since))
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
    """An answer that streams text: what `look` finds new, until it says that nothing follows. It is silent while nothing is new."""
    return Stream(_text(look), follower, media_type="text/plain; charset=utf-8")


async def _text(look: Callable[[], tuple[bytes, bool]]) -> AsyncIterator[bytes]:
    while True:
        data, over = await _in_thread(look)
        yield data
        if over:
            return
        await anyio.sleep(POLL_S)


async def _while_open(content: AsyncIterator[str | bytes], follower: Follower) -> AsyncIterator[str | bytes]:
    """What `content` has, as long as the key opens; it gives something empty when it has looked and found nothing."""
    looked_at = time.monotonic()
    async for piece in content:
        if piece:
            yield piece
        if time.monotonic() - looked_at >= follower.streams.look_at_key_s:
            try:
                await _in_thread(follower.look_again)
            except FtError as error:
                raise _KeyEnded from error
            looked_at = time.monotonic()


async def _in_thread(call: Callable[[], _T]) -> _T:
    return await anyio.to_thread.run_sync(call, limiter=_limiter())


def _limiter() -> anyio.CapacityLimiter:
    try:
        return _looking.get()
    except LookupError:
        _looking.set(made := anyio.CapacityLimiter(MAX_LOOKING))
        return made
