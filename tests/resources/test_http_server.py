"""What a caller may send before the application sees it: bounded in bytes and in time, over real sockets."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from control_plane.api.app import create_app
from control_plane.platform.context import Platform
from resources import http_server
from resources.http_server import HEAD_TIMEOUT_S, KEEP_ALIVE_S, MAX_HEAD_BYTES, BoundedHttp, config
from tests.support.servers.served_app import served

MIB = 1 << 20


class ImpatientHttp(BoundedHttp):
    head_timeout_s = 3.0


@pytest.fixture(scope="module")
def url(platform: Platform) -> Iterator[str]:
    with served(create_app(platform), http=ImpatientHttp) as at:
        yield at


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    """Answers with the length of the body, and of each header ``x-...``; /slow sends for longer than a head may take."""

    async def length(request: Request) -> PlainTextResponse:
        body = await request.body()
        return PlainTextResponse(f"{len(body)} {sum(len(v) for k, v in request.headers.items() if k.startswith('x-'))}")

    async def slow(_request: Request) -> StreamingResponse:
        async def pieces() -> object:
            import anyio

            for _ in range(12):
                yield b"x"
                await anyio.sleep(0.3)

        return StreamingResponse(pieces())  # type: ignore[arg-type]

    app = Starlette(routes=[Route("/", length, methods=["GET", "POST"]), Route("/slow", slow)])
    with served(app, http=ImpatientHttp, timeout_keep_alive=1) as at:
        yield at


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname or "", parts.port or 0), timeout=30)


def sent(sock: socket.socket, *pieces: bytes) -> int:
    """Bytes that the server let us send before it closed."""
    total = 0
    try:
        for piece in pieces:
            sock.sendall(piece)
            total += len(piece)
    except (BrokenPipeError, ConnectionResetError):
        pass
    return total


def received(sock: socket.socket) -> bytes:
    data = b""
    try:
        while chunk := sock.recv(65536):
            data += chunk
    except ConnectionResetError:
        pass
    return data


class Watch:
    """Asks for /healthz all the time; `count` is the number of answers."""

    def __init__(self, url: str) -> None:
        self._url, self._ended = url, threading.Event()
        self.count = 0
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60, trust_env=False) as client:
            while not self._ended.is_set():
                assert client.get("/healthz").status_code == 200
                self.count += 1
                time.sleep(0.02)

    def __enter__(self) -> Watch:
        assert httpx.get(f"{self._url}/healthz", timeout=60).status_code == 200  # the first imports what later ones need not
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def await_answers(self, count: int) -> None:
        """Since the beginning; each of them came within the minute for which the client waits."""
        deadline = time.monotonic() + 60
        while self.count < count:
            assert time.monotonic() < deadline and self._thread.is_alive(), f"{self.count} answers"
            time.sleep(0.02)


@pytest.fixture
def watch(url: str) -> Iterator[Watch]:
    with Watch(url) as made:
        yield made


def test_a_server_has_the_documented_limits_unless_others_are_given() -> None:
    made = config(Starlette())
    assert made.http is BoundedHttp and BoundedHttp.head_timeout_s == HEAD_TIMEOUT_S == 10
    assert made.timeout_keep_alive == KEEP_ALIVE_S == 75


def test_a_url_of_64_mib_holds_up_nobody(url: str, watch: Watch) -> None:
    with closing(connect(url)) as sock:
        passed = sent(sock, b"GET /", *[b"a" * MIB] * 64, b" HTTP/1.1\r\nHost: x\r\n\r\n")
        received(sock)
    assert passed < 16 * MIB, "the connection was read to its end"
    watch.await_answers(3)


def test_headers_of_129_mib_hold_up_nobody(url: str, watch: Watch) -> None:
    with closing(connect(url)) as sock:
        lines = b"".join(b"x-%d: %s\r\n" % (i, b"v" * 1000) for i in range(1000))
        passed = sent(sock, b"GET /healthz HTTP/1.1\r\nHost: x\r\n", *[lines] * 129, b"\r\n")
        received(sock)
    assert passed < 16 * MIB
    watch.await_answers(3)


def test_200_half_open_connections_hold_up_nobody_and_are_closed(url: str, watch: Watch) -> None:
    with ExitStack() as stack:
        held = [stack.enter_context(closing(connect(url))) for _ in range(200)]
        for i, sock in enumerate(held):
            sock.sendall((b"", b"GET /healthz HT", b"GET /healthz HTTP/1.1\r\nHost: x\r\nx-half: ")[i % 3])
        began = time.monotonic()
        answered = stack.enter_context(closing(connect(url)))
        answered.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in answered.recv(65536)
        answered.sendall(b"\r\n")  # an empty line begins the time of the next head
        drip = held[2]
        drip.settimeout(0.5)
        closed_after = None
        while time.monotonic() - began < ImpatientHttp.head_timeout_s + 60 and closed_after is None:
            try:
                drip.sendall(b"v")  # a byte now and then buys no time
                if drip.recv(65536):
                    closed_after = time.monotonic() - began
            except TimeoutError:
                continue
            except OSError:
                closed_after = time.monotonic() - began
        assert closed_after is not None and closed_after > ImpatientHttp.head_timeout_s - 1
        for i, sock in enumerate(held[3:]):
            answer = received(sock)
            assert (answer == b"") if i % 3 == 0 else answer.startswith(b"HTTP/1.1 408 ")
        assert b"HTTP/1.1 408 " in received(answered)
    watch.await_answers(10)


def test_a_refused_head_is_told_the_limit_and_what_to_do(echo: str) -> None:
    with closing(connect(echo)) as sock:
        sent(sock, b"GET / HTTP/1.1\r\nHost: x\r\nx-long: " + b"v" * (MAX_HEAD_BYTES + 1))
        head, _, body = received(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    error = json.loads(body)["error"]
    assert error["code"] == "headers_too_large" and str(MAX_HEAD_BYTES) in error["message"] and "send a shorter URL" in error["message"]


@pytest.mark.parametrize("size", [1000, 30_000])
def test_a_head_within_the_limit_passes_in_pieces(echo: str, size: int) -> None:
    with closing(connect(echo)) as sock:
        for piece in (b"GET / HTTP/1.1\r\nHo", b"st: x\r\nx-long: ", b"v" * (size - 7), b"v" * 7 + b"\r\nConnection: close\r\n", b"\r\n"):
            sock.sendall(piece)
            time.sleep(0.05)
        assert received(sock).endswith(f"0 {size}".encode())


def test_bodies_are_not_counted_as_headers(echo: str) -> None:
    body = b"b" * (20 * MIB)
    assert httpx.post(echo, content=body).text == f"{len(body)} 0"
    assert httpx.post(echo, content=iter([b"b" * 100_000] * 50)).text == "5000000 0"  # in chunks
    with httpx.Client() as client:  # on one connection, heads after bodies
        assert [client.post(echo, content=b"b" * n, headers={"x-a": "v" * 9000}).text for n in (0, 70_000, 3, 40_000)] == [
            "0 9000", "70000 9000", "3 9000", "40000 9000"
        ]  # fmt: skip


@pytest.mark.parametrize("endless", [b"x: " + b"v" * 1000 + b"\r\n", b"v" * 1000, b"\r\n" * 500])
def test_trailers_without_end_are_cut_off(echo: str, endless: bytes) -> None:
    with closing(connect(echo)) as sock:
        start = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\nx-trailer: "
        assert sent(sock, start, *[endless * 100] * 640) < 32 * MIB
        received(sock)


def test_an_idle_connection_is_closed(echo: str) -> None:
    with closing(connect(echo)) as idle:
        idle.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        began = time.monotonic()
        assert b"200 OK" in idle.recv(65536)
        assert idle.recv(65536) == b"" and time.monotonic() - began < 1 + 5


def test_a_request_for_a_websocket_is_a_request_like_any_other(url: str, echo: str) -> None:
    upgrade = (
        b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
    )
    with closing(connect(url)) as sock:
        sock.sendall(b"GET /v1/models HTTP/1.1\r\nhost: evil.example.com\r\n" + upgrade)
        answer = b""
        while not answer.endswith(b"}"):
            piece = sock.recv(65536)
            assert piece, answer
            answer += piece
    assert answer.startswith(b"HTTP/1.1 403 ") and b'"host_not_allowed"' in answer, "middleware saw it"
    with closing(connect(echo)) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nx-a: 1234\r\n" + upgrade)
        answer = received(sock)
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"0 4")


def test_a_request_in_progress_is_answered_after_the_end_of_the_server_was_announced() -> None:
    """Its answer waits for the announcement, as that of a stream does."""
    began, stopping = threading.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            began.set()
            await stopping.wait()
            await PlainTextResponse("answered")(scope, receive, send)

    listener = socket.create_server(("127.0.0.1", 0))
    server = http_server.Server(
        http_server.config(app, log_level="error", timeout_graceful_shutdown=20, lifespan="off"), on_stop=stopping.set
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    with closing(connect(f"http://127.0.0.1:{listener.getsockname()[1]}")) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert began.wait(20)
        server.should_exit = True
        answer = received(sock)
    thread.join(20)
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"answered") and not thread.is_alive()


def test_a_head_that_is_refused_during_an_answer_puts_nothing_into_that_answer(echo: str) -> None:
    with closing(connect(echo)) as sock:
        sock.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = sock.recv(65536)
        sent(sock, b"GET / HTTP/1.1\r\nHost: x\r\nx-long: " + b"v" * (MAX_HEAD_BYTES + 1))
        answer += received(sock)
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.count(b"HTTP/1.1 ") == 1
    assert not answer.endswith(b"0\r\n\r\n"), "the connection was closed at once"


@pytest.mark.timeout(60)
def test_an_answer_that_takes_longer_than_a_head_may_is_not_cut(echo: str) -> None:
    parts = urlsplit(echo)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 0, timeout=30)
    connection.request("GET", "/slow")
    assert connection.getresponse().read() == b"x" * 12
    connection.close()
