"""Sends webhooks over HTTP: one POST to a checked address, in a bounded time, whatever the receiver does.

A name is resolved once, all its addresses are checked, and the connection goes to one of them, so no second resolution can return another
address. TLS verifies the name as usual. Proxies, cookies and redirects are not used.
"""

from __future__ import annotations

import asyncio
import email.utils
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from typing import Any

import httpcore
import httpx

from control_plane.platform.protocols import WebhookAnswer
from core.errors import InvalidRequest
from core.public_addresses import Address, Network, Target, parse, permitted
from core.storable_text import printable

TIMEOUT_S = 10.0
"""Limit for resolution, connection, handshake and response together, also if a receiver trickles its response."""
CHECK_TIMEOUT_S = 5.0
MAX_BODY_BYTES = 16 * 1024
BODY_S = 1.0
"""Seconds to wait for the body after the status, which decides."""
SHOWN_CHARS = 200
"""Characters of a response that tenants see. Responses from `allowed` networks, which belong to the operator, are not shown."""

Resolve = Callable[[str, int], Sequence[str]]
"""Returns the addresses of a host and port as strings; raises ``OSError`` if there are none."""


def system_resolve(host: str, port: int) -> Sequence[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


@cache
def _public_trust() -> ssl.SSLContext:
    return httpx.create_ssl_context()


class HttpWebhookSender:
    """Sends over a new connection for each call. Thread-safe. `allowed` networks are permitted although they are not public."""

    def __init__(
        self,
        *,
        allowed: Sequence[Network] = (),
        resolve: Resolve = system_resolve,
        trust: Callable[[], ssl.SSLContext] = _public_trust,
        timeout_s: float = TIMEOUT_S,
        network: Callable[[], httpcore.AsyncNetworkBackend] = httpcore.AnyIOBackend,
    ) -> None:
        self._allowed = tuple(allowed)
        self._resolve = resolve
        self._trust = trust
        self._network = network
        self._timeout_s = timeout_s

    def check(self, url: str) -> None:
        self._addresses(parse(url), time.monotonic() + CHECK_TIMEOUT_S)

    def send(self, url: str, *, headers: Mapping[str, str], body: bytes) -> WebhookAnswer:
        deadline = time.monotonic() + self._timeout_s
        try:
            target = parse(url)
            addresses = self._addresses(target, deadline)
        except InvalidRequest as refused:
            return WebhookAnswer(error=refused.message)
        return asyncio.run(self._bounded(target, addresses, headers, body, deadline))

    def _addresses(self, target: Target, deadline: float) -> list[Address]:
        try:
            found = _within(deadline - time.monotonic(), lambda: self._resolve(target.host, target.port))
        except (OSError, UnicodeError):
            found = []  # same error as for an address that is not permitted, so that names of the internal network cannot be probed
        return permitted(target, found, allowed=self._allowed)

    async def _bounded(
        self, target: Target, addresses: Sequence[Address], headers: Mapping[str, str], body: bytes, deadline: float
    ) -> WebhookAnswer:
        """Return the last answer of :meth:`_exchange`. Once a status has arrived, later errors are ignored."""
        answer = WebhookAnswer(error="no answer")
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                async for received in self._exchange(target, addresses, headers, body):
                    answer = received
        except (TimeoutError, httpcore.TimeoutException):
            error = f"no answer within {self._timeout_s:g} s"
        except httpcore.ConnectError as e:
            error = _connection_failed(e)
        except httpcore.RemoteProtocolError:
            error = "the receiver closed the connection without an answer, or its answer is not HTTP"
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError):
            error = "the connection was interrupted"
        else:
            return answer
        return answer if answer.status is not None else WebhookAnswer(error=error)

    async def _exchange(
        self, target: Target, addresses: Sequence[Address], headers: Mapping[str, str], body: bytes
    ) -> AsyncIterator[WebhookAnswer]:
        """Yield the answer when its status arrives, and again with the beginning of its text."""
        url = httpcore.URL(scheme=target.scheme.encode(), host=target.host.encode(), port=target.port, target=target.path)
        fields = [(b"host", target.host_header), (b"content-length", str(len(body)).encode())]
        fields += [(name.encode(), value.encode()) for name, value in headers.items()]
        trust = self._trust() if target.scheme == "https" else None
        async with (
            httpcore.AsyncConnectionPool(ssl_context=trust, max_connections=1, network_backend=_Pinned(addresses, self._network())) as pool,
            pool.stream("POST", url, headers=fields, content=body) as answer,
        ):
            received = WebhookAnswer(status=answer.status, retry_after_s=_retry_after(answer.headers))
            yield received
            text = await _beginning(answer)
            if not any(a in network for a in addresses for network in self._allowed):
                yield replace(received, text=text)


class _Pinned(httpcore.AsyncNetworkBackend):
    """Connects to the checked addresses, whatever host is requested."""

    def __init__(self, addresses: Sequence[Address], network: httpcore.AsyncNetworkBackend) -> None:
        self._addresses = addresses
        self._network = network

    async def connect_tcp(
        self,
        host: str,  # noqa: ARG002  the name was resolved already
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        for address in self._addresses[:-1]:
            try:
                return await self._network.connect_tcp(str(address), port, timeout or TIMEOUT_S / 3, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return await self._network.connect_tcp(str(self._addresses[-1]), port, timeout, local_address, socket_options)


async def _beginning(answer: httpcore.Response) -> str:
    """Return the first characters of the body, within :data:`BODY_S` and :data:`MAX_BODY_BYTES`."""
    read = b""
    try:
        async with asyncio.timeout(BODY_S):
            stream = answer.aiter_stream()
            assert isinstance(stream, AsyncIterator)
            async for chunk in stream:
                read += chunk
                if len(read) >= MAX_BODY_BYTES:
                    break
    except (TimeoutError, httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException):
        pass  # the status decides
    return printable(" ".join(read[:MAX_BODY_BYTES].decode(errors="replace").split()))[:SHOWN_CHARS]


def _retry_after(headers: Sequence[tuple[bytes, bytes]]) -> float | None:
    """Return the seconds in a ``Retry-After`` number or date; None for anything else."""
    value = next((v.decode("ascii", "replace").strip() for name, v in headers if name.lower() == b"retry-after"), "")
    if value.isascii() and value.isdecimal():
        return float(value[:9])
    try:
        when = email.utils.parsedate_to_datetime(value)
    except (ValueError, OverflowError, TypeError):  # OverflowError: an offset of a million years
        return None
    return max(0.0, (when.replace(tzinfo=when.tzinfo or UTC) - datetime.now(UTC)).total_seconds())


def _connection_failed(error: httpcore.ConnectError) -> str:
    """Describe the error without addresses, but with the reason for a refused certificate."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"the receiver's certificate was refused: {cause.verify_message}"
        if isinstance(cause, ssl.SSLError):
            return "the TLS handshake failed"
        cause = cause.__cause__ or cause.__context__
    return "the connection failed"


def _within(seconds: float, call: Callable[[], Sequence[str]]) -> Sequence[str]:
    """Return the result of `call`; raise ``OSError`` if it takes too long. The system's resolver has no time limit."""
    done: list[Sequence[str] | BaseException] = []

    def run() -> None:
        try:
            done.append(call())
        except BaseException as e:
            done.append(e)

    thread = threading.Thread(target=run, daemon=True, name="resolve")
    thread.start()
    thread.join(max(0.0, seconds))
    if not done:
        raise OSError("the name was not resolved in time")
    if isinstance(done[0], BaseException):
        raise done[0]
    return done[0]
