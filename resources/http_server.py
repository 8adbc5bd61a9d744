"""uvicorn with limits on the size and duration of a request's head (request line and headers).

uvicorn's parser joins the pieces of a URL or header as they arrive, in time quadratic in their length, and waits for the rest without a
time limit. All HTTP servers of the platform use :func:`config`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

MAX_HEAD_BYTES = 32 * 1024
"""Limit for request line and headers together, and for the trailers of a chunked body: nginx's default (four buffers of 8 KiB)."""
HEAD_TIMEOUT_S = 10.0
"""From the first byte to the end of the headers; for the first request, from the start of the connection."""
KEEP_ALIVE_S = 75
"""Idle connections are closed after this, and by proxies earlier: ingress-nginx and AWS's load balancer keep them for 60 s. A request
that a proxy sends while the server closes the connection is lost, and a proxy does not repeat a POST."""


class BoundedHttp(HttpToolsProtocol):
    """Answers 431 to a head that is too long, 408 to one that takes too long, and closes the connection."""

    head_timeout_s = HEAD_TIMEOUT_S
    _head_open = True
    """True from the end of a request to the end of the next one's headers."""
    _unparsed_bytes = 0
    """Bytes received since the parser last completed a head, a piece of a body, or a message."""
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head_open:
            self._start_deadline()
        rest = memoryview(data)
        while rest and not self.transport.is_closing() and self.transport.get_protocol() is self:
            piece, rest = rest[:MAX_HEAD_BYTES], rest[MAX_HEAD_BYTES:]
            self._unparsed_bytes += len(piece)
            super().data_received(piece)  # type: ignore[arg-type]  # the parser takes any buffer
            if self._unparsed_bytes > MAX_HEAD_BYTES:
                self._refuse(
                    431, f"the request line and headers exceed {MAX_HEAD_BYTES} bytes; send a shorter URL and fewer headers",
                    code="headers_too_large",
                )  # fmt: skip

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start_deadline()

    def on_headers_complete(self) -> None:
        self._head_open, self._unparsed_bytes = False, 0
        self._cancel_deadline()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_open, self._unparsed_bytes = True, 0
        super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: the request is answered like any other, and whoever sends it could fill the log."""

    def _start_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.head_timeout_s, self._head_is_late)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _head_is_late(self) -> None:
        self._deadline = None
        message = f"the request line and headers took longer than {self.head_timeout_s:g} s; send them at once"
        self._refuse(408, message, code="headers_too_slow")

    def _refuse(self, status: int, message: str, *, code: str) -> None:
        """Close the connection, with an error response unless another response is in progress or the client has sent nothing."""
        if self.transport.is_closing():
            return
        responding = self.cycle is not None and not self.cycle.response_complete
        if not responding and self._unparsed_bytes:
            body = json.dumps({"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}).encode()
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()


def config(app: ASGIApp, **options: Any) -> uvicorn.Config:
    """Return the configuration of a server for `app`; `options` are those of ``uvicorn.Config``.

    Without websockets, unless `options` name a protocol for them: :class:`BoundedHttp` and middleware limit requests alone.
    """
    defaults: dict[str, Any] = {"http": BoundedHttp, "ws": "none", "timeout_keep_alive": KEEP_ALIVE_S, "access_log": False}
    return uvicorn.Config(app, **{**defaults, **options})


class Server(uvicorn.Server):
    """Calls `on_stop` before it waits for requests in progress: responses that never end by themselves can then end."""

    def __init__(self, config: uvicorn.Config, *, on_stop: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self._on_stop = on_stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()
        await super().shutdown(sockets)


def run(app: ASGIApp, *, on_stop: Callable[[], None] = lambda: None, **options: Any) -> None:
    """Serve `app` until SIGTERM or SIGINT."""
    server = Server(config(app, **options), on_stop=on_stop)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again after its shutdown
        server.run()
    if not server.started:
        sys.exit("the server did not start; see its log")
