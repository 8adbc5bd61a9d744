"""Webhooks over HTTP: one POST to an address that was checked, in a bounded time, whatever the receiver does.

A name is resolved once, every address that it stands for is checked, and the connection goes to one of them: between check and
connection there is no second resolution that could answer otherwise. TLS verifies the name as ever. Nothing else of the
environment is used: no proxy, no cookie, no redirect.
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
from control_plane.platform.webhook_targets import Address, Network, Target, parse, permitted
from ft_assets.errors import InvalidRequest
from ft_assets.storable_text import printable

TIMEOUT_S = 10.0
"""Of everything: resolution, connection, handshake, answer. A receiver that answers drop by drop gets no more."""
CHECK_TIMEOUT_S = 5.0
MAX_BODY_BYTES = 16 * 1024
BODY_S = 1.0
"""Waited for the body once the status is there: the status decides."""
SHOWN_CHARS = 200
"""Of an answer, where its address is not one of those `allowed` to us: what the operator's own network says is no tenant's to read."""

Resolve = Callable[[str, int], Sequence[str]]
"""Addresses of a host, as texts; ``OSError`` when there are none."""


def system_resolve(host: str, port: int) -> Sequence[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


@cache
def _public_trust() -> ssl.SSLContext:
    return httpx.create_ssl_context()


class HttpWebhookSender:
    """Thread-safe; each call makes a connection of its own. `allowed` networks may be sent to although they are not public."""

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
            found = []  # told in the same words as one that may not be sent to: names of the inner network are nobody's to learn
        return permitted(target, found, allowed=self._allowed)

    async def _bounded(
        self, target: Target, addresses: Sequence[Address], headers: Mapping[str, str], body: bytes, deadline: float
    ) -> WebhookAnswer:
        """The last that :meth:`_exchange` told: a status, once it is there, stands whatever becomes of the rest; else why there is none."""
        answer = WebhookAnswer(error="no answer")
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                async for told in self._exchange(target, addresses, headers, body):
                    answer = told
        except (TimeoutError, httpcore.TimeoutException):
            error = f"no answer within {self._timeout_s:g} s"
        except httpcore.ConnectError as e:
            error = _connection_failed(e)
        except httpcore.RemoteProtocolError:
            error = "the receiver closed the connection without an answer, or answered with something that is no HTTP"
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError):
            error = "the connection broke"
        else:
            return answer
        return answer if answer.status is not None else WebhookAnswer(error=error)

    async def _exchange(
        self, target: Target, addresses: Sequence[Address], headers: Mapping[str, str], body: bytes
    ) -> AsyncIterator[WebhookAnswer]:
        """The answer as soon as its status is there, and again with the beginning of its text."""
        url = httpcore.URL(scheme=target.scheme.encode(), host=target.host.encode(), port=target.port, target=target.path)
        fields = [(b"host", target.host_header), (b"content-length", str(len(body)).encode())]
        fields += [(name.encode(), value.encode()) for name, value in headers.items()]
        trust = self._trust() if target.scheme == "https" else None
        async with (
            httpcore.AsyncConnectionPool(ssl_context=trust, max_connections=1, network_backend=_Pinned(addresses, self._network())) as pool,
            pool.stream("POST", url, headers=fields, content=body) as answer,
        ):
            heard = WebhookAnswer(status=answer.status, retry_after_s=_retry_after(answer.headers))
            yield heard
            text = await _beginning(answer)
            if not any(a in network for a in addresses for network in self._allowed):
                yield replace(heard, text=text)


class _Pinned(httpcore.AsyncNetworkBackend):
    """Connects to the addresses that were checked, whatever host is asked for."""

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
    """The first characters of the body; more than is read of it is never waited for."""
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
        pass  # the status is known, and decides
    return printable(" ".join(read[:MAX_BODY_BYTES].decode(errors="replace").split()))[:SHOWN_CHARS]


def _retry_after(headers: Sequence[tuple[bytes, bytes]]) -> float | None:
    """Seconds, of a number or a date; None for anything else."""
    value = next((v.decode("ascii", "replace").strip() for name, v in headers if name.lower() == b"retry-after"), "")
    if value.isascii() and value.isdecimal():
        return float(value[:9])
    try:
        when = email.utils.parsedate_to_datetime(value)
    except (ValueError, OverflowError, TypeError):  # an offset of a million years is no offset
        return None
    return max(0.0, (when.replace(tzinfo=when.tzinfo or UTC) - datetime.now(UTC)).total_seconds())


def _connection_failed(error: httpcore.ConnectError) -> str:
    """Told without addresses, but with what is wrong with a certificate."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"the receiver's certificate is refused: {cause.verify_message}"
        if isinstance(cause, ssl.SSLError):
            return "the TLS handshake failed"
        cause = cause.__cause__ or cause.__context__
    return "no connection could be made"


def _within(seconds: float, call: Callable[[], Sequence[str]]) -> Sequence[str]:
    """What `call` returns, or ``OSError`` when that takes too long: the system's resolver knows no time limit."""
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
