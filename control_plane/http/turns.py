"""Turns among callers: of the requests that a caller has open, a process works on a few at a time.

All callers share a process's threads and its interpreter lock, so one with 150 connections would have the others wait for each of its
requests. Those beyond a caller's share wait in order, unread, and cost nothing.

1. A request has a turn from its beginning to the first byte of its response; streams, and answers of models, have limits of their own.
2. It gives the turn up while it waits for its body, for a validation or the object store (:func:`give_up_turn`), or for its caller to
   hang up.
3. A caller is a tenant or an operator, whatever the key; callers whose keys have not worked yet share the turns of their address.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from control_plane.http import error_responses
from control_plane.http.authentication import secret_of
from control_plane.http.error_responses import Refused
from control_plane.http.rate_limits import RateLimits, TenantLimiter
from ft_assets.errors import FtError

TURNS, TURNS_OF_ONE = 40, 4
"""As many as there are threads; and of one caller twice as many as keep a core busy: a request is 10 ms of Python, of which one thread runs
at a time, and 4 ms of waiting for the database. Each further thread of one caller would only have the others wait for the interpreter."""
WAIT_S = 20.0
CODE = "too_many_at_once"
UNREADABLE_BYTES = 1 << 63
UNLIMITED = frozenset({"/livez", "/healthz", "/readyz", "/metrics"})


class Turns:
    """Middleware that has requests wait for a turn; one that waits too long is refused with ``too_many_at_once``."""

    def __init__(self, app: ASGIApp, *, each: int = TURNS_OF_ONE, total: int = TURNS, wait_s: float = WAIT_S) -> None:
        self.app = app
        self._make = partial(TenantLimiter, total=total, each=each, wait_s=wait_s, what="requests", code=CODE)
        self._limiter: TenantLimiter | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in UNLIMITED:
            await self.app(scope, receive, send)
            return
        if self._limiter is None:  # here: a limiter belongs to a running loop
            self._limiter = self._make()
        request = Request(scope)
        limits: RateLimits = request.app.state.rate_limits
        async with _Turn(self._limiter, limits.owner_of(request, secret_of(request)[0])) as turn:
            scope.setdefault("state", {})["turn"] = turn

            async def receive_between() -> Message:
                await turn.give_up()
                message = await receive()
                if message["type"] == "http.request" and not message.get("more_body", False):
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


class _Turn:
    """The turn of one request, which may be given up and taken again."""

    def __init__(self, limiter: TenantLimiter, owner: str) -> None:
        self._limiter, self._owner = limiter, owner
        self._held: AsyncExitStack | None = None
        self.is_over = False

    async def __aenter__(self) -> _Turn:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    async def take(self) -> None:
        if self._held is None and not self.is_over:
            held = AsyncExitStack()
            await held.enter_async_context(self._limiter.turn(self._owner))
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
    turn: _Turn | None = request.scope.get("state", {}).get("turn")
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
    turn: _Turn | None = request.scope.get("state", {}).get("turn")
    if turn is not None:
        await turn.end()
