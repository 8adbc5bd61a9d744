"""Middleware of every request: allowed hosts, request id, protective headers, responses to failures, log line, metrics, trace span."""

from __future__ import annotations

import contextlib
import json
import logging
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from control_plane.api.metrics.request_metrics import RequestMeter
from control_plane.http import error_responses
from control_plane.platform.context import Platform
from control_plane.tenants.sessions import COOKIE
from core.errors import Forbidden
from core.telemetry import correlation, spans
from core.telemetry.spans import Span

HEADER = b"x-request-id"
PROBES = frozenset({"/livez", "/healthz", "/readyz", "/metrics"})
"""Requested every few seconds: logged at debug level, not counted, not traced."""
CLIENT_GONE = 499
"""Status of a request whose sender closed the connection before the body was complete, as nginx logs it; nobody gets this answer."""
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0"})
"""Names of this machine; the last one is where an API that listens on all addresses finds itself."""
ANY_HOST = "*"
"""In ``FT_API_HOSTS``: a proxy checks the hosts."""
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
                message["headers"] = [*protected(scope, message.get("headers", ())), (HEADER, request_id.encode())]
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


def protected(scope: Scope, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return `headers` so that no browser guesses a content type, and no cache keeps what the API answered to a console's session."""
    found = [(name, value) for name, value in headers if name.lower() != b"x-content-type-options"]
    found.append((b"x-content-type-options", b"nosniff"))
    if scope["path"].startswith("/v1/") and any(key == b"cookie" and f"{COOKIE}=".encode() in value for key, value in scope["headers"]):
        found = [(name, value) for name, value in found if name.lower() != b"cache-control"]
        found += [(b"cache-control", b"no-store"), (b"vary", b"cookie")]
    return found


class AllowedHosts:
    """Refuses a request under a name that is not the API's: a foreign one that resolves to this machine (DNS rebinding), or a mistaken one.

    Allowed are the hosts of the settings, loopback names, and the address that the connection was made to. Probes may use any.
    """

    def __init__(self, app: ASGIApp, platform: Platform) -> None:
        self.app, settings = app, platform.settings
        own = (urlsplit(url).hostname for url in (settings.public_url, settings.internal_url))
        self._hosts = LOOPBACK | {host for host in own if host} | set(settings.api_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["type"] == "http" and scope["path"] not in PROBES and not self._allows(scope):
            named = ", ".join(value.decode("latin-1") for key, value in scope["headers"] if key == b"host")
            message = f"host {named[:100]!r} is not allowed; use {min(self._hosts - LOOPBACK, default='localhost')}, or have an operator"
            app = error_responses.response(Forbidden(f"{message} set FT_PUBLIC_URL or add yours to FT_API_HOSTS", code="host_not_allowed"))
        await app(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        named = [value.decode("latin-1") for key, value in scope["headers"] if key == b"host"]
        try:
            host = urlsplit(f"//{named[0]}").hostname if len(named) == 1 else None
        except ValueError:
            return False
        reached = (scope.get("server") or ("",))[0]
        return host is not None and (host in self._hosts or host == reached or ANY_HOST in self._hosts)


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
