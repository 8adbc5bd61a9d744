"""Middleware that bounds the bodies of requests.

1. Nothing of a body is read before the key, session or attempt's token in the headers was found to work. FastAPI itself parses a body
   first; here the first `receive` authenticates, and the route authenticates again, because only it knows what the caller may do.
2. A body is refused beyond the bytes of its path (413), and JSON beyond a number of values (413) or a depth (400), before it is parsed.
3. A body that comes too slowly is refused (408).

A response sent before the body was read closes the connection, so that no client sends gigabytes to a refusal. For a moment the rest is
thrown away first: closed at once, the connection would be reset while the client still sends, and many clients then lose the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from contextlib import AsyncExitStack
from typing import NoReturn

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from control_plane.attempts import routes_agents
from control_plane.datasets.scored_suites.service import MAX_FILE_BYTES as MAX_SCORED_BYTES
from control_plane.datasets.suites import MAX_FILE_BYTES
from control_plane.http import authentication, error_responses
from control_plane.http.authentication import FORM, missing_key, secret_of
from control_plane.http.error_responses import Refused
from control_plane.http.rate_limits import RateLimits, TenantLimiter
from control_plane.http.turns import announced_bytes, during_turn, has_body
from control_plane.tenants.sessions import COOKIE
from core.errors import BodyTooLarge, BodyTooSlow, FtError, InvalidRequest
from core.storable_text import MAX_DEPTH

MIB = 1 << 20
NEGLIGIBLE_BYTES = MIB
"""The connection is kept for another request if no more than this is left of a body."""
STREAMED = re.compile(r"/v1/(?:files|uploads/[^/]+/parts)")
"""Streamed to storage by routes with limits of their own."""
MAX_BODY_BYTES = MIB
MAX_FORM_BYTES = MIB // 4
"""URL-encoded fields: only the console has them."""
MAX_OPEN_FORM_BYTES = 16 * 1024
"""Forms that come before there is a session: a key, or the choice of a tenant."""
OPEN_FORMS = frozenset({"/console/sign-in", "/console/oidc/choose"})
MAX_VALUES = 20_000
"""Values in a JSON body: each is validated and may be named in the refusal, at 16 us per value. An upload has at most 10,000 parts."""
MAX_PROMPT_VALUES = 200_000
"""Values in a completion request: its prompt may be a list of tokens, the longest context of current models being 131,072."""
STRING_OR_STRUCTURE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[{\]},]', re.DOTALL)
INTERNAL = "/internal/"
COMPLETIONS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
OTHER_LIMITS = {**dict.fromkeys(COMPLETIONS, 4 * MIB), "/v1/suites": MAX_FILE_BYTES + MIB, "/v1/scored_suites": MAX_SCORED_BYTES + MIB}
"""Long conversations; and files with other fields."""
MAX_INTERNAL_BYTES = 4 * MIB
"""Manifests of checkpoints with thousands of files, from agents."""
INLINE_BYTES = 64 * 1024
"""A larger JSON body is checked in a thread, one of a tenant's at a time."""
CHECKS = 4
CHECK_WAIT_S = 20.0
BODY_GRACE_S = 20.0
MIN_BYTES_PER_S = 16 * 1024
"""A body may take the grace period, and a second more for each so many bytes: a slow mobile link sends 60 KiB/s. Time in which the route
does not read does not count."""
READING, READING_EACH = 64, 8
"""Bodies over 64 KiB that are on their way into memory at once, and those of one tenant; others wait unread."""
DISCARDED_BYTES, DISCARD_S = 8 * MIB, 2.0
"""What is still taken of a refused body before its connection is closed."""


class RequestBodies:
    """Refuses bodies, and sends ``connection: close`` with a response to a request whose large body was not read to its end.

    The server then closes the connection.
    """

    def __init__(self, app: ASGIApp, *, grace_s: float = BODY_GRACE_S) -> None:
        self.app = app
        self._grace_s = grace_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(raw=list(scope.get("headers", ())))
        length, comes_in_chunks = announced_bytes(headers), "transfer-encoding" in headers
        if scope["type"] != "http" or not has_body(headers):
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        body = _Body(Request(scope), limit_of(path, headers), receive, is_json=is_json(headers), grace_s=self._grace_s)
        body.is_read = not (comes_in_chunks or length > NEGLIGIBLE_BYTES)

        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and not body.is_read:
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            ends = message["type"] == "http.response.body" and not message.get("more_body", False)
            if ends and not body.is_read:
                await send({**message, "more_body": True})
                await body.discard()
                message = {"type": "http.response.body"}
            await send(message)

        refusal: FtError | None = None
        if path.startswith("/v1/") and not _has_credential(headers):
            refusal = missing_key("ft-op-..." if path.startswith("/v1/admin/") else "ft-sk-...")
        elif body.limit is not None and length > body.limit:
            refusal = too_large(path, body.limit)
        app = self.app if refusal is None else error_responses.response(refusal)
        body.is_large = body.limit is not None and (comes_in_chunks or length > INLINE_BYTES)
        async with body.room:
            await app(scope, body.receive, closing)


class _Body:
    """The body of one request on its way in."""

    def __init__(self, request: Request, limit: int | None, receive: Receive, *, is_json: bool, grace_s: float) -> None:
        self.limit, self._grace_s = limit, grace_s
        self.is_read = False
        """Whether the connection can be kept: no more than a negligible part of the body is left."""
        self.is_large = False
        self.room = AsyncExitStack()
        """Held by a large body until it is in memory and its request has a turn."""
        self._request, self._receive, self._path = request, receive, str(request.scope["path"])
        self._authenticated = self._path in OPEN_FORMS
        self._pieces: list[bytes] | None = [] if is_json and limit is not None else None
        self._num_bytes, self._waited_s, self._has_ended = 0, 0.0, False

    async def receive(self) -> Message:
        """Return the next piece; ``Refused`` for an unknown caller, and for a body that is too large, too deep or too slow."""
        if not self._authenticated:
            await self._authenticate()
        if self.is_large:
            self.is_large = False
            await self._wait_for_room()
        message = await (self._receive() if self._has_ended else self._in_time())
        self._num_bytes += len(message.get("body", b""))
        ends = message["type"] != "http.request" or not message.get("more_body", False)
        self._has_ended = self._has_ended or ends
        self.is_read = self.is_read or ends
        if self.limit is not None and self._num_bytes > self.limit:
            self._refuse(too_large(self._path, self.limit))
        if self._pieces is not None and message["type"] == "http.request":
            self._pieces.append(message.get("body", b""))
            if ends:
                await self._check(b"".join(self._pieces))
        if ends:
            await self.room.aclose()
        return message

    async def discard(self) -> None:
        """Throw away what still comes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                most, ends = self._num_bytes + DISCARDED_BYTES, False
                while self._num_bytes < most and not ends:
                    message = await self._receive()
                    self._num_bytes += len(message.get("body", b""))
                    ends = not message.get("more_body", False)

    async def _authenticate(self) -> None:
        """Look the caller up, unless its key or session worked a moment ago: the route does so again in any case."""
        limits: RateLimits = self._request.app.state.rate_limits
        if limits.knows(secret_of(self._request)[0]):
            self._authenticated = True
            return
        recognize = routes_agents.recognize if self._path.startswith(INTERNAL) else authentication.recognize
        try:
            async with during_turn(self._request):
                await run_in_threadpool(recognize, self._request)
        except FtError as error:
            self._refuse(error)
        self._authenticated = True

    async def _wait_for_room(self) -> None:
        try:
            await self.room.enter_async_context(_limiter(self._request, "bodies_read", READING, READING_EACH).turn(_owner(self._request)))
        except FtError as error:
            self._refuse(error)

    async def _in_time(self) -> Message:
        limit_s = self._grace_s + self._num_bytes / MIN_BYTES_PER_S
        began = time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, limit_s - self._waited_s)):
                return await self._receive()
        except TimeoutError:
            message = (
                f"{self._num_bytes} bytes of the body came in {limit_s:.3g} s; send it within {self._grace_s:g} s, or at more than "
                f"{MIN_BYTES_PER_S} bytes a second"
            )
            self._refuse(BodyTooSlow(message))
        finally:
            self._waited_s += time.monotonic() - began

    async def _check(self, body: bytes) -> None:
        self._pieces = None
        try:
            if len(body) <= INLINE_BYTES:
                check_structure(self._path, body)
            else:
                await _limiter(self._request, "body_checks", CHECKS, 1).run(
                    _owner(self._request), lambda: check_structure(self._path, body)
                )
        except FtError as error:
            self._refuse(error)

    def _refuse(self, error: FtError) -> NoReturn:
        self.is_read = False
        raise Refused(error) from error


def _limiter(request: Request, name: str, total: int, each: int) -> TenantLimiter:
    found: TenantLimiter | None = getattr(request.app.state, name, None)
    if found is None:  # here: a limiter belongs to a running loop
        found = TenantLimiter(total=total, each=each, wait_s=CHECK_WAIT_S, what="large bodies", code="bodies_busy")
        setattr(request.app.state, name, found)
    return found


def _owner(request: Request) -> str:
    """Return the same text for all keys and sessions of a tenant."""
    limits: RateLimits = request.app.state.rate_limits
    return limits.owner_of(request, secret_of(request)[0])


def limit_of(path: str, headers: Headers) -> int | None:
    """Return the limit of a body for this path in bytes; None if the route itself counts them."""
    if path in OPEN_FORMS:
        return MAX_OPEN_FORM_BYTES
    if any(FORM in media_type.lower() for media_type in headers.getlist("content-type")):
        return MAX_FORM_BYTES
    if path.startswith(INTERNAL):
        return MAX_INTERNAL_BYTES
    bare = path.rstrip("/")
    return None if STREAMED.fullmatch(bare) else OTHER_LIMITS.get(bare, MAX_BODY_BYTES)


def is_json(headers: Headers) -> bool:
    """Whether a route may parse the body as JSON: FastAPI uses the first of several content types, and may parse a body without one as
    JSON."""
    media_types = headers.getlist("content-type")
    return not media_types or any("json" in media_type.lower() for media_type in media_types)


def check_structure(path: str, body: bytes) -> None:
    """Raise 413 for JSON with too many values, and 400 for nesting that is too deep; what stands inside strings does not count.

    400 for UTF-16 and UTF-32, which Python's parser reads too: there the bytes of a letter may look like the end of a string.
    """
    if b"\0" in body:
        raise InvalidRequest(f"the JSON body of {path[:80]} has a NUL byte; send UTF-8, and write \\u0000 in strings", code="invalid_json")
    most = MAX_PROMPT_VALUES if path.rstrip("/") in COMPLETIONS else MAX_VALUES
    num_openings = body.count(b"[") + body.count(b"{")
    if num_openings <= MAX_DEPTH and num_openings + body.count(b",") < most:
        return
    num_values = depth = 0
    for num_found, match in enumerate(STRING_OR_STRUCTURE.finditer(body)):
        mark = body[match.start()]
        num_values += mark in b"[{,"
        depth += (mark in b"[{") - (mark in b"]}")
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"the JSON body of {path[:80]} is nested deeper than {MAX_DEPTH}; flatten it", code="too_deep")
        if num_values >= most or num_found >= 6 * most:  # valid JSON has at most two strings, an opening and its end beside each
            raise BodyTooLarge(f"the JSON body of {path[:80]} has more than {most} values; send fewer in one request")


def too_large(path: str, limit: int) -> BodyTooLarge:
    """Return the error for a body beyond the limit of its path."""
    if limit in (MAX_FORM_BYTES, MAX_OPEN_FORM_BYTES):
        return BodyTooLarge(f"the body is larger than {limit} bytes, the limit of {FORM}; send JSON, or files as multipart/form-data")
    return BodyTooLarge(
        f"the body is larger than {limit} bytes ({limit // MIB} MiB), the limit of {path[:80]}; send less in one request, and files "
        "through POST /v1/files or /v1/uploads"
    )


def _has_credential(headers: Headers) -> bool:
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    return (scheme.lower() == "bearer" and bool(credentials.strip())) or any(f"{COOKIE}=" in one for one in headers.getlist("cookie"))
