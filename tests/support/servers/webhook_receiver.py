"""A receiver of webhooks that behaves as its path says: well, or in one of the ways in which receivers do not."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    path: str
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes

    @property
    def event(self) -> dict[str, Any]:
        return dict(json.loads(self.body))


@dataclass(kw_only=True)
class Receiver:
    """What it received, and ``answers`` by path: a status, which may be changed while it runs."""

    port: int
    host: str = "127.0.0.1"
    scheme: str = "http"
    received: list[Received] = field(default_factory=list)
    num_connections: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    released: threading.Event = field(default_factory=threading.Event)
    """Ends what hangs."""

    def url(self, path: str = "/ok") -> str:
        return f"{self.scheme}://{self.host}:{self.port}{path}"

    def at(self, path: str) -> list[Received]:
        return [r for r in self.received if urlsplit(r.path).path == path]


@contextmanager
def receiver(*, tls: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    """``/ok`` 200, ``/status/N`` N, ``/hang`` nothing, ``/drip`` a header now and then, ``/later`` 200 and no body,
    ``/redirect?to=``, ``/close``, ``/big``, ``/nonsense``; `Receiver.statuses` overrides by path."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(size := int(self.headers["content-length"]))
            if len(body) < size:
                return  # its sender was killed while it sent
            here.received.append(Received(path=self.path, headers={k.lower(): v for k, v in self.headers.items()}, body=body))
            url = urlsplit(self.path)
            kind = url.path.split("/")[1]
            if (fixed := here.statuses.get(url.path)) is not None:
                self._answer(fixed)
            elif kind == "status":
                after = parse_qs(url.query).get("after")
                self._answer(int(url.path.split("/")[2]), {"Retry-After": after[0]} if after else {}, b"sorry: \x1b[31m no")
            elif kind == "hang":
                here.released.wait(60)
            elif kind == "drip":
                self._drip()
            elif kind == "later":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
                here.released.wait(60)
            elif kind == "redirect":
                self._answer(307, {"Location": parse_qs(url.query)["to"][0]})
            elif kind == "nonsense":
                self.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n")
            elif kind == "big":
                self._answer(500, {}, b"x" * 5_000_000)
            elif kind != "close":
                self._answer(200)

        def _answer(self, status: int, headers: Mapping[str, str] | None = None, body: bytes = b"") -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _drip(self) -> None:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            while not here.released.wait(0.02):
                self.wfile.write(b"X-Drop: 1\r\n")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def get_request(self) -> tuple[socket.socket, Any]:
            here.num_connections += 1
            return super().get_request()

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # the sender has gone

    server = Server(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=True)
    here = Receiver(port=server.server_address[1], scheme="https" if tls else "http")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield here
    finally:
        here.released.set()
        server.shutdown()
        server.server_close()
        thread.join(timeout=60)


def until(what: Any, *, within_s: float = 60.0) -> None:
    """Wait for `what` to hold."""
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)
