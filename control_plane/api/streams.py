"""Server-sent events: what is new, as often as it is looked for, until the subject has come to its end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

import anyio
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

POLL_S = 0.5
KEEP_ALIVE_S = 15.0
"""Seconds without an event after which a comment is sent: proxies cut silent connections after 30 to 60."""

Look = Callable[[int], tuple[Sequence[tuple[int, str]], bool]]
"""From the number of the last event sent to the numbered events (JSON) behind it, and whether none can follow these."""


def server_sent(look: Look, since: int = 0) -> StreamingResponse:
    """An answer that streams the events behind number `since`, then ``[DONE]``."""
    return StreamingResponse(_follow(look, since), media_type="text/event-stream", headers={"cache-control": "no-cache"})


def last_seen(last_event_id: str | None) -> int:
    """The number in a ``Last-Event-ID`` header; 0, the beginning, for anything else."""
    return int(last_event_id) if last_event_id and last_event_id.isdecimal() else 0


async def _follow(look: Look, since: int) -> AsyncIterator[str]:
    silent_s = 0.0
    while True:
        events, over = await run_in_threadpool(look, since)
        for number, data in events:
            since, silent_s = number, 0.0
            yield f"id: {number}\ndata: {data}\n\n"
        if over and not events:
            yield "data: [DONE]\n\n"
            return
        if events:
            continue
        await anyio.sleep(POLL_S)
        silent_s += POLL_S
        if silent_s >= KEEP_ALIVE_S:
            silent_s = 0.0
            yield ": waiting\n\n"


def text_as_it_comes(look: Callable[[], tuple[bytes, bool]]) -> StreamingResponse:
    """An answer that streams text: what `look` finds new, until it says that nothing follows."""
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(_text(look), media_type="text/plain; charset=utf-8", headers=headers)


async def _text(look: Callable[[], tuple[bytes, bool]]) -> AsyncIterator[bytes]:
    while True:
        data, over = await run_in_threadpool(look)
        if data:
            yield data
        if over:
            return
        await anyio.sleep(POLL_S)
