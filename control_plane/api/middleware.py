"""Middleware of every request: request id, limits on bodies, responses to failures, log line, metrics, trace span.

Without a key, or beyond the limit of the path, a body is not read: FastAPI itself parses a body before authentication. A response sent
before the body was read closes the connection, so that no client sends gigabytes to a refusal.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from control_plane.api.metrics.request_metrics import RequestMeter
from control_plane.datasets.suites import MAX_FILE_BYTES
from control_plane.http import error_responses
from control_plane.http.authentication import FORM, missing_key
from control_plane.tenants.sessions import COOKIE
from ft_assets.errors import BodyTooLarge, FtError
from ft_assets.telemetry import correlation, spans
from ft_assets.telemetry.spans import Span

HEADER = b"x-request-id"
PROBES = frozenset({"/livez", "/healthz", "/readyz", "/metrics"})
"""Requested every few seconds: logged at debug level, not counted, not traced."""
CLIENT_GONE = 499
"""Status of a request whose sender closed the connection before the body was complete, as nginx logs it; nobody gets this answer."""
UNMATCHED = "unmatched"
"""Route label of unknown paths: the path itself is arbitrary, and appears in no label or log line."""

log = logging.getLogger(__name__)
access = logging.getLogger("control_plane.api.access")


@dataclass(kw_only=True, slots=True)
class _Answer:
    """Facts about a response on its way out."""

    began: float
    status: int = 500
    first_byte_s: float | None = None
    num_bytes: int = 0

    def saw(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.first_byte_s = message["status"], time.perf_counter() - self.began
        elif message["type"] == "http.response.body":
            self.num_bytes += len(message.get("body", b""))


class RequestIds:
    """Gives each request an id; the log line of a failure has it, and the caller sees nothing else of the failure."""

    def __init__(self, app: ASGIApp, meter: RequestMeter | None = None) -> None:
        self.app = app
        self.meter = meter or RequestMeter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        answer = _Answer(began=time.perf_counter())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (HEADER, request_id.encode())]
            answer.saw(message)
            await send(message)

        with correlation.scope(request_id=request_id), self._watched(scope, answer):
            try:
                await self.app(scope, receive, send_with_id)
            except ClientDisconnect:
                answer.status = CLIENT_GONE
            except Exception as error:
                log.exception("%s %s failed", scope["method"], route_of(scope))
                correlation.bind(code="server_error")
                if answer.first_byte_s is not None:
                    raise  # half a response has been sent: only cutting the connection tells the caller
                del error
                await _send_server_error(send_with_id, request_id)

    @contextlib.contextmanager
    def _watched(self, scope: Scope, answer: _Answer) -> Iterator[None]:
        """Count, trace and log what happens inside, however it ends."""
        if scope["path"] in PROBES:
            try:
                yield
            finally:
                _log(scope, answer, level=logging.DEBUG)
            return
        self.meter.began()
        try:
            with spans.span(scope["method"], parent=_header(scope, b"traceparent"), kind="server") as span:
                try:
                    yield
                finally:
                    _describe(span, scope, answer)
                    _log(scope, answer, level=logging.INFO)
        finally:
            self.meter.ended(
                method=scope["method"],
                route=route_of(scope),
                status=answer.status,
                seconds=answer.first_byte_s if answer.first_byte_s is not None else time.perf_counter() - answer.began,
                code=_code(),
            )


def route_of(scope: Scope) -> str:
    """Return the template of the matching route: ``/v1/files/{file_id}``, whatever the id."""
    of_included = (scope.get("fastapi") or {}).get("effective_route_context")  # includes the prefix of the router
    for route in (of_included, scope.get("route")):
        path = getattr(route, "path_format", None)
        if isinstance(path, str) and path:
            return path
    return UNMATCHED


def _code() -> str | None:
    code = correlation.fields().get("code")
    return None if code is None else str(code)


def _describe(span: Span, scope: Scope, answer: _Answer) -> None:
    if not span.recorded:
        return
    route = route_of(scope)
    span.rename(f"{scope['method']} {route}")
    span.set(http__request__method=scope["method"], http__route=route, http__response__status_code=answer.status)
    if answer.status >= 500:
        span.fail(_code() or str(answer.status))


def _log(scope: Scope, answer: _Answer, *, level: int) -> None:
    """One line per request, without ids in the path, query, headers or body."""
    if not access.isEnabledFor(level):
        return
    method, route, ms = scope["method"], route_of(scope), 1000 * (time.perf_counter() - answer.began)
    fields: dict[str, object] = {"method": method, "route": route, "status": answer.status, "bytes": answer.num_bytes}
    fields |= {"duration_ms": round(ms, 1), "first_byte_ms": round(1000 * answer.first_byte_s, 1) if answer.first_byte_s else None}
    text = "%s %s %d in %.1f ms, %d bytes"
    access.log(level, text, method, route, answer.status, ms, answer.num_bytes, extra={"fields": fields})


def _header(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


async def _send_server_error(send: Send, request_id: str) -> None:
    message = f"the server failed on this request; it may work if sent again. Tell your operator the request id {request_id}"
    body = json.dumps({"error": {"message": message, "type": "server_error", "param": None, "code": "server_error"}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 500, "headers": headers})
    await send({"type": "http.response.body", "body": body})


MIB = 1 << 20
NEGLIGIBLE_BYTES = MIB
"""Bodies up to this size are read, and the connection is kept."""
STREAMED = re.compile(r"/v1/(?:files|uploads/[^/]+/parts)")
"""Streamed by routes that authenticate first, with their own limits."""
MAX_BODY_BYTES = 4 * MIB
MAX_FORM_BYTES = MIB // 4
"""Of URL-encoded fields: those of the console are parsed before the caller is known, and no other route needs them."""
MAX_VALUES = 20_000
"""Values in a JSON body: each is validated and may be named in the refusal, at 16 us per value. An upload has at most 10,000 parts."""
MAX_PROMPT_VALUES = 1_000_000
"""Values in a completion request, which is passed on unchecked: its prompt may be a list of tokens."""
STRING_OR_COMMA = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|,', re.DOTALL)
COMPLETIONS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
OTHER_LIMITS = {**dict.fromkeys(COMPLETIONS, 16 * MIB), "/v1/suites": MAX_FILE_BYTES + MIB}
"""Conversations with images; and files with other fields."""


class UnreadBodies:
    """Refuses bodies, and sends ``connection: close`` with a response to a request whose large body was not read to its end.

    The server then closes the connection.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(raw=list(scope.get("headers", ())))
        length, comes_in_chunks = _length(headers), "transfer-encoding" in headers
        if scope["type"] != "http" or not (length or comes_in_chunks):
            await self.app(scope, receive, send)
            return
        pieces: list[bytes] | None = [] if is_json(headers) else None
        limit, num_bytes, is_read = limit_of(scope["path"], headers), 0, not (comes_in_chunks or length > NEGLIGIBLE_BYTES)

        async def watched() -> Message:
            nonlocal is_read, num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            is_read = is_read or message["type"] != "http.request" or not message.get("more_body", False)
            if limit is not None and num_bytes > limit:
                is_read = False
                raise HTTPException(BodyTooLarge.http_status, detail=too_large(scope["path"], limit).message)
            if pieces is not None and limit is not None and message["type"] == "http.request":
                pieces.append(message.get("body", b""))
                if not message.get("more_body", False):
                    refuse_many_values(scope["path"], b"".join(pieces))
            return message

        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and not is_read:
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        refusal: FtError | None = None
        if scope["path"].startswith("/v1/") and not _has_credential(headers):
            refusal = missing_key("ft-op-..." if scope["path"].startswith("/v1/admin/") else "ft-sk-...")
        elif limit is not None and length > limit:
            refusal = too_large(scope["path"], limit)
        app = self.app if refusal is None else error_responses.response(refusal)
        await app(scope, watched, closing)


def limit_of(path: str, headers: Headers) -> int | None:
    """Return the limit of a body for this path in bytes; None if the route itself counts them."""
    if any(FORM in media_type.lower() for media_type in headers.getlist("content-type")):
        return MAX_FORM_BYTES
    bare = path.rstrip("/")
    return None if STREAMED.fullmatch(bare) else OTHER_LIMITS.get(bare, MAX_BODY_BYTES)


def is_json(headers: Headers) -> bool:
    """Whether a route may parse the body as JSON: FastAPI uses the first of several content types, and may parse a body without one as
    JSON."""
    media_types = headers.getlist("content-type")
    return not media_types or any("json" in media_type.lower() for media_type in media_types)


def refuse_many_values(path: str, body: bytes) -> None:
    """Raise 413 for JSON with too many values; commas inside strings do not count."""
    most = MAX_PROMPT_VALUES if path.rstrip("/") in COMPLETIONS else MAX_VALUES
    if body.count(b",") < most:
        return
    found = [match[0] == b"," for match in itertools.islice(STRING_OR_COMMA.finditer(body), 3 * most)]
    if sum(found) >= most or len(found) == 3 * most:  # in valid JSON, every third match is a comma: a key and a value lie between two
        raise HTTPException(
            BodyTooLarge.http_status, detail=f"the JSON body of {path[:80]} has more than {most} values; send fewer in one request"
        )


def too_large(path: str, limit: int) -> BodyTooLarge:
    if limit == MAX_FORM_BYTES:
        return BodyTooLarge(f"the body is larger than {limit} bytes, the limit of {FORM}; send JSON, or files as multipart/form-data")
    return BodyTooLarge(
        f"the body is larger than {limit} bytes ({limit // MIB} MiB), the limit of {path[:80]}; send less in one request, and files "
        "through POST /v1/files or /v1/uploads"
    )


def _has_credential(headers: Headers) -> bool:
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    return (scheme.lower() == "bearer" and bool(credentials.strip())) or f"{COOKIE}=" in headers.get("cookie", "")


def _length(headers: Headers) -> int:
    length = headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() and len(length) < 20 else 0
