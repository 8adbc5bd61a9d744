"""Access control for Dagster's webserver, which has no authentication and accepts mutations by GET.

A request or websocket is accepted if all of these hold:

1. ``Host`` is an allowed host, so that a foreign name that resolves to this machine is refused (DNS rebinding).
2. ``Origin``, if sent, is an allowed host, too; a session that changes something must send it.
3. It carries an operator's key or the installation's token as bearer token, or the cookie of an operator's session.
4. A GET of ``/graphql`` only queries; a POST is JSON, which a form on another site cannot send.

Sessions are those of the console. On the console's host its cookie is sent here, too. Elsewhere a session begins at ``/ft/login``: with an
operator's key, or with a ticket of the console, which holds its session, encrypted, for ``TICKET_S``. A websocket is closed within
``RECHECK_S`` of the end of the session, or of the key, that it was opened with.
"""

from __future__ import annotations

import hmac
import html
import time
from collections.abc import Callable, Sequence
from http.cookies import CookieError, SimpleCookie
from typing import TypeVar
from urllib.parse import parse_qs

import anyio
import anyio.to_thread
from cryptography.fernet import InvalidToken
from graphql import GraphQLError, OperationDefinitionNode, OperationType, parse
from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import Headers, QueryParams
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from control_plane.http.rate_limits import RateLimits
from control_plane.platform.context import Platform
from control_plane.platform.secrets import cipher
from control_plane.tenants import operators, sessions
from control_plane.tenants.rules import Operator
from core.errors import Forbidden, FtError, InvalidRequest, RateLimited, Unauthenticated, Unavailable

LOGIN, GRAPHQL = "/ft/login", "/graphql"
COOKIE = "ft_operator"
"""Of a session that began here. It is not the console's, so that signing in here leaves a tenant's session on the same host alone."""
TICKET_S = 30
"""Seconds between the console's redirect and its arrival."""
RECHECK_S = 10.0
"""Seconds between checks of an open websocket's session, one indexed query each. A page of the UI has one websocket."""
MAX_FORM_BYTES = 4096
FORM_S = 10.0
"""Seconds in which the form of a sign-in comes: its sender is not known yet."""
ONLY_OPERATORS = "Dagster's UI is for operators of the platform."
JSON_TYPES = frozenset({"application/json", "application/graphql"})
SAFE = frozenset({"GET", "HEAD"})
POLICY_VIOLATION = 1008
"""Close code of a websocket (RFC 6455, 7.4.1)."""
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'",
    "cache-control": "no-store",
}
FORM = """<label for="key">Operator key</label><input id="key" name="key" type="password" autocomplete="off" required autofocus>
<button>Sign in</button><p>Create a key on the platform's machine: <code>ft admin operators create NAME</code></p>"""
ARRIVED_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Dagster</title>
<meta http-equiv="refresh" content="0; url={target}"></head><body><p><a href="{target}">Continue</a></p></body></html>"""
"""A page of this site leads on: the browser withholds strict cookies from a redirect of another site."""
LOGIN_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Sign in - Dagster</title>
<style>body{{font:16px system-ui;display:grid;place-items:center;min-height:90vh;margin:0;color:#1c2733}}
form{{width:22rem;display:grid;gap:.75rem}}input,button{{font:inherit;padding:.5rem}}p{{margin:0;line-height:1.4}}</style></head>
<body><form method="post" action="/ft/login"><h1>Sign in</h1><p role="alert">{message}</p>
{form}<p><a href="{console}">Sign in with the console</a></p></form></body></html>"""


def allowed_hosts(port: int, configured: Sequence[str]) -> frozenset[str]:
    """Return the allowed values of ``Host``: this machine's names with `port`, and ``FT_DAGSTER_HOSTS``."""
    return frozenset({f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}", *configured})


_T = TypeVar("_T")


class AccessControl:
    """ASGI middleware around Dagster's application, for operators of `platform` and for holders of `token`."""

    def __init__(self, app: ASGIApp, *, platform: Platform, token: str, hosts: frozenset[str], form_s: float = FORM_S) -> None:
        self._app, self._platform, self._token, self._hosts, self._form_s = app, platform, token.encode(), hosts, form_s
        self._limits = RateLimits(platform)
        self._used: dict[str, float] = {}
        """Tickets that were used, with the time."""
        self._origins = frozenset(f"{scheme}://{host}" for scheme in ("http", "https") for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check_host_and_origin(headers)
            if scope["type"] == "http" and scope["path"] == LOGIN:
                answer = await self._login(Request(scope, receive))
                await answer(scope, receive, send)
                return
            await self._check_caller(HTTPConnection(scope))
            if scope["path"].rstrip("/") == GRAPHQL and scope["type"] == "http":
                _check_graphql(scope, headers)
        except FtError as error:
            await self._refuse(error, scope, headers, receive, send)
            return
        if scope["type"] == "websocket":
            await self._while_allowed(scope, receive, send)
        else:
            await self._app(scope, receive, _unframed(send))

    async def _while_allowed(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application's websocket; it is disconnected when its caller loses access."""
        ended = anyio.Event()

        async def receiving() -> Message:
            message: Message = {"type": "websocket.disconnect", "code": POLICY_VIOLATION}

            async def take() -> None:
                nonlocal message
                message = await receive()
                either.cancel_scope.cancel()

            async with anyio.create_task_group() as either:
                either.start_soon(take)
                await ended.wait()
                either.cancel_scope.cancel()
            return message

        async def sending(message: Message) -> None:
            if not ended.is_set():
                await send(message)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch, HTTPConnection(scope), send, ended)
            await self._app(scope, receiving, sending)
            tasks.cancel_scope.cancel()

    async def _watch(self, caller: HTTPConnection, send: Send, ended: anyio.Event) -> None:
        """Close the websocket and set `ended` once its caller is refused. It stays open while the database does not answer."""
        while not ended.is_set():
            await anyio.sleep(RECHECK_S)
            try:
                await self._check_caller(caller)
            except (RateLimited, Unavailable):
                continue
            except FtError as error:
                ended.set()
                await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": error.code})

    def _check_host_and_origin(self, headers: Headers) -> None:
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            raise Forbidden(
                f"host {', '.join(hosts)[:100]!r} is not allowed; use {min(self._hosts)}, or add yours to FT_DAGSTER_HOSTS",
                code="host_not_allowed",
            )
        if any(origin.lower() not in self._origins for origin in origins):
            raise Forbidden(
                f"pages of {origins[0][:100]!r} may not call this server; add its host to FT_DAGSTER_HOSTS", code="origin_not_allowed"
            )

    async def _check_caller(self, caller: HTTPConnection) -> None:
        headers = caller.headers
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            if not hmac.compare_digest(bearer.strip().encode(), self._token):
                await self._authenticate(caller, operators.authenticate, bearer.strip())
            return
        await self._check_session(caller)
        changes = caller.scope["type"] == "websocket" or caller.scope["method"] not in SAFE
        if changes and "origin" not in headers:
            raise Forbidden("a session must send Origin to change something; use a bearer token in scripts", code="origin_not_allowed")

    async def _check_session(self, caller: HTTPConnection) -> None:
        """Accept an operator's session that began here, or the console's."""
        refusal = Unauthenticated(f"no session; sign in at {LOGIN}, or send Authorization: Bearer ft-op-...", code="missing_api_key")
        failure: FtError = refusal
        for secret in _secrets(caller.headers):
            try:
                await self._authenticate(caller, sessions.authenticate_operator, secret)
            except (RateLimited, Unavailable):
                raise
            except FtError as error:
                failure = error
            else:
                return
        raise failure

    async def _authenticate(self, caller: HTTPConnection, authenticate: Callable[[Platform, str], Operator], secret: str) -> Operator:
        """Look up a key or session, under the API's limit of unknown ones per address."""

        def look_up() -> Operator:
            with self._limits.watching_unknown_keys(caller, secret):
                return authenticate(self._platform, secret)

        return await self._ask(look_up)

    async def _ask(self, ask: Callable[[], _T]) -> _T:
        try:
            return await anyio.to_thread.run_sync(ask)
        except SQLAlchemyError as error:
            raise Unavailable("operators cannot be checked because the database does not answer; retry in a moment") from error

    async def _login(self, request: Request) -> Response:
        if request.method != "POST":
            return await self._arrived(request) if "ticket" in request.query_params else self._page(ONLY_OPERATORS)
        body = b""
        try:
            with anyio.fail_after(self._form_s):
                async for piece in request.stream():
                    body += piece
                    if len(body) > MAX_FORM_BYTES:
                        return self._page(f"The form exceeds {MAX_FORM_BYTES} bytes; paste the key alone.", status=413, closes=True)
        except TimeoutError:
            return self._page(f"The form took longer than {self._form_s:g} s; sign in again.", status=408, closes=True)
        key = parse_qs(body.decode("latin-1")).get("key", [""])[0].strip()
        try:
            if not self._takes_keys:
                raise Forbidden("keys open the API only; sign in with the console", code="sign_in_with_oidc")
            operator = await self._authenticate(request, operators.authenticate, key)
            secret = await self._ask(lambda: sessions.sign_in(self._platform, operator))
        except FtError as error:
            return self._page(error.message, status=error.http_status)
        return _with_session(RedirectResponse("/", status_code=303), request, secret)

    async def _arrived(self, request: Request) -> Response:
        """Begin the session of a ticket of the console, once."""
        ticket, now = request.query_params["ticket"], time.monotonic()
        self._used = {used: at for used, at in self._used.items() if now - at < TICKET_S}
        try:
            secret = cipher(self._platform.settings).decrypt(ticket.encode(), ttl=TICKET_S).decode()
            if ticket in self._used:
                raise InvalidToken
            self._used[ticket] = now  # before another request with it gets a turn
            await self._authenticate(request, sessions.authenticate_operator, secret)
        except InvalidToken:
            return self._page("The way from the console took too long; go back to it and try again.", status=403)
        except FtError as error:
            del self._used[ticket]
            return self._page(error.message, status=error.http_status)
        to = request.query_params.get("to", "/")
        target = html.escape(to if to.startswith("/") and not to.startswith(("//", "/\\")) and to.isprintable() else "/")
        return _with_session(HTMLResponse(ARRIVED_PAGE.format(target=target), headers=PAGE_HEADERS), request, secret)

    async def _refuse(self, error: FtError, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()  # the handshake; closing now answers it with 403
            await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": error.code})
            return
        answer: Response
        is_page = scope["method"] == "GET" and "text/html" in headers.get("accept", "")
        if is_page and isinstance(error, Unauthenticated):
            answer = self._page(ONLY_OPERATORS, status=error.http_status)
        elif is_page and error.code == "operator_key_required":
            answer = self._page(f"{ONLY_OPERATORS} {error.message[:1].upper()}{error.message[1:]}.", status=error.http_status)
        else:
            body = {"error": {"message": error.message, "type": "invalid_request_error", "param": None, "code": error.code}}
            answer = JSONResponse(body, status_code=error.http_status)
        await answer(scope, receive, send)

    @property
    def _takes_keys(self) -> bool:
        return self._platform.settings.console_sign_in != sessions.NO_KEYS

    def _page(self, message: str, *, status: int = 200, closes: bool = False) -> Response:
        """Return the page of the sign-in; `closes` the connection, on which the rest of a body may still come."""
        console = html.escape(f"{self._platform.settings.public_url}/console/operator/dagster")
        page = LOGIN_PAGE.format(message=html.escape(message), form=FORM if self._takes_keys else "", console=console)
        return HTMLResponse(page, status_code=status, headers=PAGE_HEADERS | ({"connection": "close"} if closes else {}))


def _secrets(headers: Headers) -> list[str]:
    """Return the sessions that a request names, that of this server first."""
    try:
        cookies = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return []
    return [cookies[name].value for name in (COOKIE, sessions.COOKIE) if name in cookies]


def _with_session(answer: Response, request: Request, secret: str) -> Response:
    secure = request.url.scheme == "https"
    answer.set_cookie(COOKIE, secret, max_age=sessions.SESSION_S, httponly=True, samesite="strict", secure=secure)
    return answer


def _check_graphql(scope: Scope, headers: Headers) -> None:
    if scope["method"] == "POST":
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type not in JSON_TYPES:
            raise InvalidRequest(
                f"content type {media_type[:80]!r} is not application/json; send the query as JSON", code="graphql_not_json"
            )
        return
    for query in QueryParams(scope["query_string"]).getlist("query"):
        try:
            operations = [d for d in parse(query).definitions if isinstance(d, OperationDefinitionNode)]
        except (GraphQLError, RecursionError) as error:
            raise InvalidRequest(f"not a GraphQL document: {str(error)[:200]}", code="graphql_not_a_query") from error
        if any(o.operation is not OperationType.QUERY for o in operations):
            raise InvalidRequest("a GET may only query; send mutations as POST with a JSON body", code="graphql_not_a_query")


def _unframed(send: Send) -> Send:
    """Forbid other sites to frame the UI (clickjacking)."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (b"x-frame-options", b"DENY")]
        await send(message)

    return sending
