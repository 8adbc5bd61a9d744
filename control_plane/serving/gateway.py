"""Passes completions on to the inference servers, streamed or not.

A request goes to the server with the fewest open requests among those seen to answer with its model. As long as no part of an answer has
reached the caller, it may be sent to another server, because a completion changes nothing but a bill, and only an answer that arrives is
counted:

1. If a server refuses the connection, is overloaded, or lacks the model: try the next one. If too many of the tenant's own answers wait
   there (429): the same, and other requests go on to it.
2. If a server breaks off before its first words: try one other. A request that takes down two servers is not given a third.
3. When no server is left: look up again what is served where, for up to two seconds.
4. After the first words nothing is repeated: a stream that breaks off ends with an error event. What a server sends before them (an empty
   event that names the role) is held back.

A server that failed is skipped for a second; then one request tries it before others follow.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from core.errors import RateLimited, Unavailable
from core.telemetry import spans

TIMEOUT = httpx.Timeout(600.0, connect=2.0)
"""OpenAI's client waits 600 s for an answer; a replica that does not accept a connection in 2 s is down."""
LIMITS = httpx.Limits(max_connections=1000, max_keepalive_connections=100)
SKIP_S = 1.0
"""How long a server that failed, or lacks a model, is skipped."""
SERVER_WAIT_S = 2.0
"""How long a request waits for a server with its model: a restarted server gets its adapters back within that time."""
LOOK_AGAIN_S = 0.1
MAX_RESENDS = 1
MAX_LACKS = 1024
"""Most missing models remembered per server."""
MAX_HELD = 1 << 16
"""Bytes of a stream held back at most."""
TOO_MANY_TOKENS = ("context length", "maximum model length")
"""Words of vLLM's refusals of a prompt, or a prompt and `max_tokens`, beyond the context."""
TENANT, WEIGHT = "x-ft-tenant", "x-ft-weight"
"""Headers that tell a server whose request it is, and with which whole-number weight it shares its turns: embedded servers take turns
among tenants."""
OVERLOADED = frozenset({502, 503, 504})


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What a request was resolved to."""

    model: str
    """The servers' name for it."""
    servers: Sequence[str]
    """URLs of servers that may have it."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers for the answer."""
    sent: Mapping[str, str] = field(default_factory=dict)
    """Headers for the server."""


class ServerFailed(Exception):
    """This server does not answer; another one may."""

    def __init__(self, why: str, *, broke_off: bool = False, too_many: bool = False) -> None:
        super().__init__(why)
        self.broke_off = broke_off
        self.too_many = too_many
        """The caller's own requests are too many: the server takes others."""


@dataclass(kw_only=True, slots=True)
class _Server:
    under_way: int = 0
    failed_at: float | None = None
    trial_under_way: bool = False
    """Lets one request find out whether it has recovered."""
    lacks: dict[str, float] = field(default_factory=dict)
    """Since when, by model."""

    def leave(self) -> None:
        self.under_way -= 1


class Gateway:
    """Connections to the inference servers and their state; used from one event loop."""

    def __init__(self, client: httpx.AsyncClient, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._clock = client, clock
        self._servers: dict[str, _Server] = {}
        self._turn = itertools.count()

    def pick(self, target: Target, tried: set[str]) -> str | None:
        """Return the server to try next: healthy, with the model, and with the fewest open requests; None if all were tried."""
        left = [url for url in target.servers if url not in tried]
        if not left:
            return None
        first = next(self._turn) % len(left)
        return min(left[first:] + left[:first], key=lambda url: self._reluctance(url, target.model))

    def _reluctance(self, url: str, model: str) -> tuple[bool, bool, int]:
        server, now = self._server(url), self._clock()
        lacks = now - server.lacks.get(model, -SKIP_S) < SKIP_S
        ill = server.failed_at is not None and (now - server.failed_at < SKIP_S or server.trial_under_way)
        return lacks, ill, server.under_way

    async def forward(self, path: str, body: Mapping[str, Any], resolve: Callable[[], Awaitable[Target]]) -> Response:
        """Return one server's answer to `body`, with the model that `resolve` names; ``Unavailable`` if no server answers."""
        target, tried, resends = await resolve(), set[str](), 0
        until, why, too_many = self._clock() + SERVER_WAIT_S, "no inference server was seen to answer with it", False
        while True:
            url = self.pick(target, tried)
            if url is None:
                if self._clock() >= until:
                    if too_many:
                        raise RateLimited(f"{why}; wait for some to end, then send this request again", code="too_many_in_flight")
                    raise _unavailable(f"no inference server answers for {target.model} ({why})")
                await asyncio.sleep(LOOK_AGAIN_S)
                target, tried = await resolve(), set()
                continue
            tried.add(url)
            try:
                return await self._attempt(url, path, {**body, "model": target.model}, target)
            except ServerFailed as e:
                why, too_many, resends = str(e), e.too_many, resends + e.broke_off
                if resends > MAX_RESENDS:
                    raise _unavailable(why) from e

    def _server(self, url: str) -> _Server:
        return self._servers.setdefault(url, _Server())

    async def _attempt(self, url: str, path: str, body: Mapping[str, Any], target: Target) -> Response:
        server = self._server(url)
        traced = {"traceparent": parent} if (parent := spans.current()) else {}
        request = self._client.build_request(
            "POST", f"{url}{path}", json=body, headers={"accept-encoding": "identity", **traced, **target.sent}
        )
        server.under_way += 1
        streams, trial = False, server.failed_at is not None and not server.trial_under_way
        server.trial_under_way |= trial
        try:
            answer = await self._client.send(request, stream=True)
            try:
                self._refused(server, answer, str(body["model"]))
                made = await _relay(answer, target.headers, server.leave)
                streams = isinstance(made, _Stream)
            finally:
                if not streams:
                    await answer.aclose()
        except ServerFailed as e:
            if e.broke_off:
                server.failed_at = self._clock()
            raise
        except (httpx.ConnectError, httpx.ConnectTimeout) as e:
            server.failed_at = self._clock()
            raise ServerFailed(f"an inference server does not accept connections ({type(e).__name__})") from e
        except httpx.ReadTimeout as e:
            raise _unavailable("the inference server took too long") from e
        except httpx.HTTPError as e:
            server.failed_at = self._clock()
            raise ServerFailed(f"the inference server broke off ({type(e).__name__})", broke_off=True) from e
        finally:
            if not streams:
                server.leave()
            if trial:
                server.trial_under_way = False
        server.failed_at = None
        return made

    def _refused(self, server: _Server, answer: httpx.Response, model: str) -> None:
        if answer.status_code == 404:
            self._remember_lack(server, model)
            raise ServerFailed("the inference servers do not have it (any more)")
        if answer.status_code in (401, 403):  # the platform's token was refused, not the caller's key
            server.failed_at = self._clock()
            raise ServerFailed(f"the inference server refuses the platform's token ({answer.status_code})")
        if answer.status_code == 429:
            raise ServerFailed(f"too many of your answers wait for {model}", too_many=True)
        if answer.status_code in OVERLOADED:
            server.failed_at = self._clock()
            raise ServerFailed(f"the inference server takes no requests ({answer.status_code})")
        if answer.status_code >= 500:
            raise ServerFailed(f"the inference server failed ({answer.status_code})", broke_off=True)
        server.lacks.pop(model, None)

    def _remember_lack(self, server: _Server, model: str) -> None:
        now = self._clock()
        if len(server.lacks) >= MAX_LACKS:
            server.lacks = dict([(m, at) for m, at in server.lacks.items() if now - at < SKIP_S][1 - MAX_LACKS :])
        server.lacks[model] = now


def client(token: str, transport: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncClient:
    """Open the connection pool to the inference servers, which require `token`; ignores environment proxies."""
    headers = {"authorization": f"Bearer {token}"}
    return httpx.AsyncClient(timeout=TIMEOUT, limits=LIMITS, transport=transport, trust_env=False, headers=headers)


class _Stream(StreamingResponse):
    """A streamed answer; however it ends, the server's side is closed."""

    def __init__(self, first: bytes, rest: AsyncIterator[bytes], answer: httpx.Response, left: Callable[[], None], **kinds: Any) -> None:
        super().__init__(_chunks(first, rest), **kinds)
        self._answer, self._left = answer, left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._left()
            await self._answer.aclose()  # a caller that hangs up ends the generation


async def _relay(answer: httpx.Response, headers: Mapping[str, str], left: Callable[[], None]) -> Response:
    media_type = answer.headers.get("content-type", "application/json")
    if media_type.startswith("text/event-stream"):
        rest = answer.aiter_raw()
        first = await _beginning(rest)
        return _Stream(first, rest, answer, left, status_code=answer.status_code, media_type=media_type, headers=dict(headers))
    content = await answer.aread()
    if answer.status_code >= 400:
        content = _in_openai_form(content)
    return Response(content, status_code=answer.status_code, media_type=media_type, headers=dict(headers))


async def _beginning(rest: AsyncIterator[bytes]) -> bytes:
    """Return the stream up to the first chunk with content."""
    held = b""
    async for chunk in rest:
        held += chunk
        if len(held) > MAX_HELD or any(_shows(event) for event in held.split(b"\n\n")[:-1]):
            break
    return held


def _shows(event: bytes) -> bool:
    """Whether an event holds more than the beginning of an answer; unreadable events count as content."""
    try:
        choices = json.loads(event.removeprefix(b"data: "))["choices"]
        parts = [c.get("delta") or {"text": c.get("text")} for c in choices]
        return any(c.get("finish_reason") for c in choices) or any(v for p in parts for k, v in p.items() if k != "role")
    except (ValueError, KeyError, TypeError, AttributeError):
        return True


async def _chunks(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    try:
        async for chunk in rest:
            yield chunk
    except httpx.HTTPError as e:
        error = {"message": f"the inference server broke off ({type(e).__name__}); send the request again", "type": "server_error"}
        yield f"\n\ndata: {json.dumps({'error': {**error, 'param': None, 'code': 'inference_unavailable'}})}\n\n".encode()


def _in_openai_form(content: bytes) -> bytes:
    """Return a server's refusal in OpenAI's form, with its own code if that is a text: vLLM repeats the HTTP status there.

    A refusal of vLLM's for too many tokens gets the code that clients look for.
    """
    try:
        error = json.loads(content)["error"]
        message, param, code = str(error["message"]), error.get("param"), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, param, code = content[:500].decode(errors="replace"), None, None
    if not isinstance(code, str) or not code:
        code = "context_length_exceeded" if any(words in message for words in TOO_MANY_TOKENS) else "inference_refused"
    return json.dumps({"error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}}).encode()


def _unavailable(what: str) -> Unavailable:
    return Unavailable(f"{what}; the same request may succeed in a moment", code="inference_unavailable")
