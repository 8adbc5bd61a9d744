"""Receivers that answer to do harm: each is left in time, read no further than needed, and leads nowhere."""

from __future__ import annotations

import gzip
import itertools
import time
import tracemalloc
from collections.abc import Iterable

import pytest

from control_plane.platform.protocols import WebhookAnswer
from core.errors import InvalidRequest
from core.public_addresses import parse_networks
from resources.webhook_sender import BODY_S, HttpWebhookSender
from tests.support.servers.raw_server import RawServer, raw_server

HERE = parse_networks("127.0.0.1/32")
TIMEOUT_S = 1.0
MOST_BYTES = 16 << 20
"""What the system buffers of a connection that nobody reads, and more; a second without a limit is hundreds of megabytes."""
OK = b"HTTP/1.1 200 OK\r\n"
BOMB = gzip.compress(bytes(64 << 20))


def endless(piece: bytes, first: bytes = OK) -> Iterable[bytes]:
    return itertools.chain((first,), itertools.repeat(piece))


def sent_to(server: RawServer, path: str = "/", host: str = "127.0.0.1") -> WebhookAnswer:
    sender = HttpWebhookSender(allowed=HERE, timeout_s=TIMEOUT_S, resolve=lambda h, p: ["127.0.0.1"])
    return sender.send(f"http://{host}:{server.port}{path}", headers={"webhook-id": "evt_1"}, body=b"{}")


NEVER_A_STATUS = {
    "one header without an end": lambda: endless(b"a" * 65536, OK + b"X: "),
    "headers without an end": lambda: endless(b"X-Header: 1\r\n" * 4096),
    "a status line without an end": lambda: endless(b"9" * 65536, b"HTTP/1.1 200 "),
    "interim answers without an end": lambda: endless(b"HTTP/1.1 100 Continue\r\n\r\n" * 2048, b""),
    "early hints without an end": lambda: endless(b"HTTP/1.1 103 Early Hints\r\nLink: <http://127.0.0.1/>\r\n\r\n" * 1024, b""),
    "a status of ten digits": lambda: [b"HTTP/1.1 2000000000 OK\r\n\r\n"],
    "a negative length": lambda: [OK + b"Content-Length: -1\r\n\r\n"],
    "two lengths": lambda: [OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab"],
    "a NUL in a header": lambda: [OK + b"X: a\0b\r\n\r\n"],
    "an unknown transfer coding": lambda: [OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n"],
}


@pytest.mark.parametrize("attack", NEVER_A_STATUS)
def test_an_answer_that_never_becomes_one_is_an_error(attack: str) -> None:
    with raw_server(lambda _: NEVER_A_STATUS[attack]()) as server:
        begun = time.monotonic()
        answer = sent_to(server)
        assert server.requests, "it was sent"
        assert (answer.status, answer.text) == (None, "") and answer.error, answer
        assert time.monotonic() - begun < TIMEOUT_S + 10
        assert server.ended.wait(60), "the connection was closed"
        assert server.num_bytes < MOST_BYTES or "interim" in attack or "hints" in attack  # these are read, and forgotten, until time is up


AFTER_THE_STATUS = {
    "a body without a length and an end": lambda: endless(b"x" * 65536, OK + b"\r\n"),
    "chunks without an end": lambda: endless(b"10000\r\n" + b"x" * 65536 + b"\r\n", OK + b"Transfer-Encoding: chunked\r\n\r\n"),
    "an extension of a chunk without an end": lambda: endless(b"x" * 65536, OK + b"Transfer-Encoding: chunked\r\n\r\n1;"),
    "trailers without an end": lambda: endless(b"X: 1\r\n" * 4096, OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n"),
    "a length of exabytes": lambda: endless(b"x" * 65536, OK + b"Content-Length: 9000000000000000000\r\n\r\n"),
    "a body that is smaller than its length": lambda: [OK + b"Content-Length: 100\r\n\r\nxy"],
    "a bomb": lambda: [OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(BOMB), BOMB],
    "a body that claims to be packed": lambda: [OK + b"Content-Encoding: br, gzip, zstd\r\nContent-Length: 2\r\n\r\nxy"],
}


@pytest.mark.parametrize("attack", AFTER_THE_STATUS)
def test_a_status_stands_whatever_follows_it(attack: str) -> None:
    with raw_server(lambda _: AFTER_THE_STATUS[attack]()) as server:
        tracemalloc.start()
        try:
            begun = time.monotonic()
            answer = sent_to(server)
            taken_s, (_, peak) = time.monotonic() - begun, tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert (answer.status, answer.error) == (200, None)
        assert taken_s < BODY_S + TIMEOUT_S + 10
        assert peak < 8 << 20, "a bomb of 64 MiB is not unpacked"
        assert server.ended.wait(60)
        assert server.num_bytes < MOST_BYTES


@pytest.mark.parametrize("status", [300, 301, 302, 303, 305, 307, 308])
@pytest.mark.parametrize(
    "to", ["inner", "http://169.254.169.254/latest/meta-data/", "//[::ffff:127.0.0.1]/", "file:///etc/passwd", "/loop"]
)
def test_no_redirect_is_followed(status: int, to: str) -> None:
    with raw_server(lambda _: [OK + b"\r\n"]) as inner:
        location = inner.url if to == "inner" else to
        with raw_server(
            lambda _: [b"HTTP/1.1 %d Moved\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n" % (status, location.encode())]
        ) as server:
            assert sent_to(server).status == status
            assert (len(server.requests), inner.requests) == (1, [])


@pytest.mark.parametrize("status", ["401 Unauthorized", "407 Proxy Authentication Required"])
def test_a_receiver_that_asks_for_a_password_gets_none_and_no_second_request(status: str) -> None:
    head = f'HTTP/1.1 {status}\r\nWWW-Authenticate: Basic realm="x"\r\nProxy-Authenticate: NTLM\r\nContent-Length: 0\r\n\r\n'.encode()
    with raw_server(lambda _: [head]) as server:
        assert sent_to(server).status == int(status[:3])
        assert len(server.requests) == 1
        assert b"authorization" not in server.requests[0].lower()


def test_a_cookie_is_not_kept_for_the_next_delivery() -> None:
    with raw_server(lambda _: [OK + b"Set-Cookie: id=1; Path=/\r\nContent-Length: 0\r\n\r\n"]) as server:
        assert [sent_to(server).status, sent_to(server).status] == [200, 200]
        assert len(server.requests) == 2
        assert not any(b"cookie" in request.lower() for request in server.requests)


NAMES_OF_THIS_MACHINE = [
    "127.1", "0177.0.0.1", "0x7f000001", "017700000001", "127.0.0.1.", "0.0.0.0", "[::]", "[::ffff:7f00:1]", "[0:0:0:0:0:ffff:127.0.0.1]",
    "[64:ff9b::7f00:1]", "127\u30020\u30020\u30021", "\u2460\u2461\u2466.0.0.1", "\uff11\uff12\uff17.0.0.1", "LOCALHOST", "localhost.",
    "[::1%25lo]", "169.254.169.254", "0xa9fea9fe", "2852039166", "[fd00:ec2::254]", "[::ffff:a9fe:a9fe]",
]  # fmt: skip


@pytest.mark.parametrize("host", NAMES_OF_THIS_MACHINE)
def test_inner_addresses_are_refused_however_they_are_written(host: str) -> None:
    with raw_server(lambda _: [OK + b"\r\n"]) as server:
        sender = HttpWebhookSender(timeout_s=TIMEOUT_S)
        with pytest.raises(InvalidRequest) as refused:
            sender.check(f"https://{host}:{server.port}/")
        assert refused.value.code == "invalid_webhook_url"
        answer = sender.send(f"https://{host}:{server.port}/", headers={}, body=b"{}")
        assert answer.status is None and "cannot receive webhooks" in str(answer.error)
        assert server.requests == []
