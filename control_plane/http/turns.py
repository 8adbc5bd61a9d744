"""Turns among callers: of the requests that a caller has open, a process works on a few at a time.

All callers share a process's threads and its interpreter lock, so one with 150 connections would have the others wait for each of its
requests. Those beyond a caller's share wait in order, unread, and cost nothing.

1. A request has a turn from its beginning to the first byte of its response; event streams and answers of models have limits of their own.
   Pieces of a download (:class:`Download`), and what waits for another server (:func:`run_waiting`), have threads of their own.
2. It gives the turn up while it waits for its body, for a validation or the object store (:func:`give_up_turn`), or for a model.
3. A caller is a tenant or an operator, whatever the key; callers whose keys have not worked yet share the turns of their address.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TypeVar

import anyio
from fastapi.responses import StreamingResponse
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from control_plane.http import error_responses
from control_plane.http.authentication import secret_of
from control_plane.http.error_responses import Refused
from control_plane.http.rate_limits import RateLimits, TenantLimiter
from core.errors import FtError

TURNS, TURNS_OF_ONE = 40, 2
"""As many as there are threads; and of one caller two: one computes while the other waits for the database. Python runs one thread at a
time, so that more of them serve the caller no faster (34 requests a second with two and with four), and all others wait for each."""
WAITS, WAITS_OF_ONE = 16, 2
"""Threads for what waits for the object store or another server, and those of one caller."""
WAIT_S, THREAD_WAIT_S = 20.0, 300.0
CODE = "too_many_at_once"
UNREADABLE_BYTES = 1 << 63
_T = TypeVar("_T")
UNLIMITED = frozenset({"/livez", "/healthz", "/readyz", "/metrics"})


class Turns:
    """Middleware that has requests wait for a turn; one that waits too long is refused with ``too_many_at_once``."""

    def __init__(self, app: ASGIApp, *, each: int = TURNS_OF_ONE, total: int = TURNS, wait_s: float = WAIT_S) -> None:
        self.app = app
        self._make = partial(TenantLimiter, total=total, each=each, wait_s=wait_s, what="requests", code=CODE)
        self._limiter: TenantLimiter | None = None
        self._waits: TenantLimiter | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in UNLIMITED:
            await self.app(scope, receive, send)
            return
        if self._limiter is None or self._waits is None:  # here: a limiter belongs to a running loop
            self._limiter = self._make()
            self._waits = TenantLimiter(total=WAITS, each=WAITS_OF_ONE, wait_s=THREAD_WAIT_S, what="downloads and tests", code=CODE)
        request = Request(scope)
        limits: RateLimits = request.app.state.rate_limits
        async with Turn(self._limiter, self._waits, limits.owner_of(request, secret_of(request)[0])) as turn:
            scope.setdefault("state", {})["turn"] = turn

            has_body_come = False

            async def receive_between() -> Message:
                nonlocal has_body_come
                if has_body_come:  # only the caller's leaving can come, which is waited for beside the work
                    return await receive()
                await turn.give_up()
                message = await receive()
                has_body_come = message["type"] != "http.request" or not message.get("more_body", False)
                if message["type"] == "http.request" and has_body_come:
                    try:
                        await turn.take()
                    except FtError as error:
                        raise Refused(error) from error
                return message

            async def send_after(message: Message) -> None:
                if message["type"] == "http.response.start":
                    await turn.end()
                await send(message)

            try:
                await turn.take()
            except FtError as error:
                await error_responses.response(error)(scope, receive, send)
                return
            await self.app(scope, receive_between if has_body(request.headers) else receive, send_after)


class Turn:
    """The turn of one request, which may be given up and taken again."""

    def __init__(self, limiter: TenantLimiter, waits: TenantLimiter, owner: str) -> None:
        self._limiter, self._waits, self.owner = limiter, waits, owner
        self._held: AsyncExitStack | None = None
        self.is_over = False

    async def __aenter__(self) -> Turn:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    async def take(self) -> None:
        if self._held is None and not self.is_over:
            held = AsyncExitStack()
            await held.enter_async_context(self._limiter.turn(self.owner))
            self._held = held
            if self.is_over:  # since it began to wait
                await self.give_up()

    async def give_up(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            await held.aclose()

    async def end(self) -> None:
        self.is_over = True
        await self.give_up()

    async def run_waiting(self, work: Callable[[], _T]) -> _T:
        """Give the turn up for good, and run `work` in one of the threads for what waits; return its result."""
        await self.end()
        return await self._waits.run(self.owner, work)


class Download(StreamingResponse):
    """A body that is read or made piece by piece while it is sent."""

    def __init__(self, pieces: Generator[bytes], *, media_type: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__((), media_type=media_type, headers=headers)
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        turn: Turn = scope["state"]["turn"]
        self.body_iterator = self._in_turns(turn)
        try:
            await super().__call__(scope, receive, send)
        finally:
            with anyio.CancelScope(shield=True), suppress(ValueError):  # a piece is still read: its thread goes on
                await turn.run_waiting(self._pieces.close)

    async def _in_turns(self, turn: Turn) -> AsyncIterator[bytes]:
        while (piece := await turn.run_waiting(partial(next, self._pieces, None))) is not None:
            yield piece


def has_body(headers: Headers) -> bool:
    """Whether the application waits for a body; without one it only waits for its caller to hang up."""
    return "transfer-encoding" in headers or announced_bytes(headers) > 0


def announced_bytes(headers: Headers) -> int:
    """Return the length of the body in the headers: 0 without one, and more than any limit for one that cannot be read.

    Parsers take what follows here too: zeros in front, and spaces around.
    """
    length = headers.get("content-length", "0").strip(" \t").lstrip("0") or "0"
    return int(length) if length.isascii() and length.isdigit() and len(length) < 20 else UNREADABLE_BYTES


@asynccontextmanager
async def during_turn(request: HTTPConnection) -> AsyncIterator[None]:
    """Work in the request's turn, between two waits for its body."""
    turn: Turn | None = request.scope.get("state", {}).get("turn")
    if turn is None:
        yield
        return
    await turn.take()
    try:
        yield
    finally:
        await turn.give_up()


async def give_up_turn(request: HTTPConnection) -> None:
    """Let the caller's other requests go on while this one only waits."""
    turn: Turn | None = request.scope.get("state", {}).get("turn")
    if turn is not None:
        await turn.end()


def caller_of(request: HTTPConnection) -> str:
    """Return who shares turns with the request; empty for a path without turns."""
    turn: Turn | None = request.scope.get("state", {}).get("turn")
    return "" if turn is None else turn.owner


async def run_waiting(request: HTTPConnection, work: Callable[[], _T]) -> _T:
    """Run `work`, which waits for another server, so that no other request of its caller or of anybody else waits for it."""
    turn: Turn = request.scope["state"]["turn"]
    return await turn.run_waiting(work)
