"""What a client sees of each fault of a proxied HTTP server, which it reaches again afterwards."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.servers.faulty_proxy import FaultyProxy, faulty_proxy

BODY = b"x" * 20_000


class Counted(BaseHTTPRequestHandler):
    stored = 0

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY)

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        type(self).stored += 1
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def line() -> Iterator[tuple[FaultyProxy, str]]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Counted) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with faulty_proxy(*server.server_address) as (proxy, url):  # type: ignore[arg-type]
            yield proxy, url
            proxy.clear()
            assert httpx.get(url).content == BODY
        server.shutdown()


def test_a_reset_a_truncated_answer_and_503_look_like_it(line: tuple[FaultyProxy, str]) -> None:
    proxy, url = line
    proxy.refuse = True
    with pytest.raises(httpx.ReadError, match="reset"):
        httpx.get(url)
    proxy.clear()
    proxy.truncate = True
    with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
        httpx.get(url)
    proxy.clear()
    proxy.busy = True
    assert httpx.get(url).status_code == 503
    assert proxy.faults == 3


def test_a_late_answer_comes(line: tuple[FaultyProxy, str]) -> None:
    proxy, url = line
    proxy.delay_s, began = 0.2, time.monotonic()
    assert httpx.get(url).content == BODY
    assert time.monotonic() - began >= 0.4


def test_the_answer_of_a_request_that_was_carried_out_is_lost(line: tuple[FaultyProxy, str]) -> None:
    proxy, url = line
    proxy.lose_after = (b"PUT /",)
    before = Counted.stored
    with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
        httpx.put(url, content=b"data")
    assert Counted.stored == before + 1
    assert httpx.get(url).content == BODY


def test_an_upstream_that_is_away_leaves_no_socket_open(tmp_path: Path) -> None:
    proxy = FaultyProxy(str(tmp_path / "away"))
    client, ours = socket.socketpair()
    with client:
        proxy._carry(ours)
        assert client.recv(1) == b""
    gc.collect()  # a socket that was left open warns here, and fails the test
