"""Webhooks against a real receiver: what it does ends in bounded time, and nothing inner is ever connected to."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpcore
import pytest

from core.errors import InvalidRequest
from core.public_addresses import parse_networks
from resources.webhook_sender import MAX_BODY_BYTES, HttpWebhookSender, system_resolve
from tests.support.servers.certificates import contexts
from tests.support.servers.webhook_receiver import Receiver, receiver

HERE = parse_networks("127.0.0.1/32")


@pytest.fixture
def there() -> Iterator[Receiver]:
    with receiver() as started:
        yield started


def send(sender: HttpWebhookSender, url: str, body: bytes = b"{}"):  # type: ignore[no-untyped-def]
    return sender.send(url, headers={"webhook-id": "evt_1"}, body=body)


def test_a_webhook_arrives_as_it_was_sent(there: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    answer = send(HttpWebhookSender(allowed=HERE), there.url("/ok?a=1"), b'{"a":1}')
    assert (answer.status, answer.error) == (200, None)
    (got,) = there.received
    assert (got.path, got.body, got.headers["webhook-id"]) == ("/ok?a=1", b'{"a":1}', "evt_1")
    assert got.headers["host"] == f"127.0.0.1:{there.port}"


class Detour(httpcore.AnyIOBackend):
    """Connects to this machine whatever address is asked for: a public one is here."""

    async def connect_tcp(self, host: str, *args: Any, **options: Any) -> httpcore.AsyncNetworkStream:
        return await super().connect_tcp("127.0.0.1", *args, **options)


@pytest.fixture
def public(tmp_path: Path) -> Iterator[tuple[Receiver, HttpWebhookSender]]:
    """A receiver that a sender finds at a public address, and by TLS."""
    server, trust = contexts(tmp_path, host="hooks.example.com")
    with receiver(tls=server) as started:
        sender = HttpWebhookSender(allowed=HERE, resolve=lambda h, p: ["8.8.8.8"], trust=lambda: trust, network=Detour)
        yield replace(started, host="hooks.example.com"), sender


def test_the_beginning_of_what_a_public_address_answers_is_told(public: tuple[Receiver, HttpWebhookSender]) -> None:
    there, sender = public
    answer = send(sender, there.url("/status/503"))
    assert (answer.status, answer.text) == (503, "sorry: \\u001b[31m no"), "what could steer a terminal is written out"
    answer = send(sender, there.url("/big"))
    assert (answer.status, answer.text) == (500, "x" * 200), "it is not read to its end"


def test_what_an_address_of_the_operators_network_answers_is_told_to_nobody(there: Receiver) -> None:
    answer = send(HttpWebhookSender(allowed=HERE), there.url("/status/503"))
    assert (answer.status, answer.text) == (503, "")


def test_the_time_that_a_receiver_asks_for_is_told(there: Receiver) -> None:
    answer = send(HttpWebhookSender(allowed=HERE), there.url("/status/503?after=120"))
    assert (answer.status, answer.retry_after_s) == (503, 120.0)
    answer = send(HttpWebhookSender(allowed=HERE), there.url("/status/503?after=Wed,%2021%20Oct%202015%2007:28:00%20GMT"))
    assert answer.retry_after_s == 0.0
    for nonsense in ("soon", "Mon,%2001%20Jan%202024%2000:00:00%20%2B9999999999999", "99999999999999999999"):
        answer = send(HttpWebhookSender(allowed=HERE), there.url(f"/status/503?after={nonsense}"))
        assert answer.status == 503 and answer.retry_after_s in (None, 999_999_999.0)


def test_a_status_that_came_in_time_stands_when_the_body_does_not(there: Receiver) -> None:
    answer = send(HttpWebhookSender(allowed=HERE, timeout_s=60), there.url("/later"))
    assert (answer.status, answer.error) == (200, None)


@pytest.mark.parametrize("path", ["/hang", "/drip"])
def test_a_receiver_that_hangs_or_answers_drop_by_drop_is_left_in_time(there: Receiver, path: str) -> None:
    answer = send(HttpWebhookSender(allowed=HERE, timeout_s=0.5), there.url(path))
    assert answer.status is None and answer.error == "no answer within 0.5 s", "the whole of it is bounded, not each read"


class Counting(Detour):
    """Counts what is read of an answer; the last piece of a very long one never comes."""

    def __init__(self) -> None:
        self.streams: list[CountedStream] = []

    async def connect_tcp(self, host: str, *args: Any, **options: Any) -> httpcore.AsyncNetworkStream:
        self.streams.append(CountedStream(await super().connect_tcp(host, *args, **options)))
        return self.streams[-1]


class CountedStream(httpcore.AsyncNetworkStream):
    def __init__(self, inner: httpcore.AsyncNetworkStream) -> None:
        self._inner, self.num_bytes = inner, 0

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        found = await self._inner.read(max_bytes, timeout)
        self.num_bytes += len(found)
        return found

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._inner.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._inner.aclose()

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


@pytest.mark.parametrize("host", ["127.0.0.1", "8.8.8.8"], ids=["of the operator's network", "of a public address"])
def test_a_long_answer_is_not_read_to_its_end(there: Receiver, host: str) -> None:
    """It has 5 MB, of which the sender wants 16 KiB; what the connection had ready in one piece comes on top."""
    network = Counting()
    sender = HttpWebhookSender(allowed=parse_networks("127.0.0.1/32,8.8.8.8/32"), resolve=lambda h, p: [host], network=lambda: network)
    answer = send(sender, f"http://hooks.example.com:{there.port}/big")
    assert answer.status == 500
    (stream,) = network.streams
    assert stream.num_bytes < 16 * MAX_BODY_BYTES


@pytest.mark.parametrize("path", ["/close", "/nonsense"])
def test_an_answer_that_is_none_is_told_as_such(there: Receiver, path: str) -> None:
    answer = send(HttpWebhookSender(allowed=HERE), there.url(path))
    assert answer.status is None and "closed the connection without an answer" in str(answer.error)


def test_a_port_where_nobody_listens_is_no_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert send(HttpWebhookSender(allowed=HERE), f"http://127.0.0.1:{port}/").error == "the connection failed"


def test_a_redirect_is_an_answer_and_leads_nowhere(there: Receiver) -> None:
    with receiver() as inner:
        answer = send(HttpWebhookSender(allowed=HERE), there.url(f"/redirect?to={inner.url('/secret')}"))
        assert answer.status == 307
        assert inner.num_connections == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0x7f.1", "2130706433", "0", "[::1]", "[::ffff:127.0.0.1]"])
def test_this_machine_is_reached_under_none_of_its_names(there: Receiver, host: str) -> None:
    url = f"https://{host}:{there.port}/"
    sender = HttpWebhookSender()
    with pytest.raises(InvalidRequest, match="public addresses alone"):
        sender.check(url)
    assert "public addresses alone" in str(send(sender, url).error)
    assert there.num_connections == 0


class Rebinding:
    """A name that stands for `first`, and for `then` whenever it is asked for again."""

    def __init__(self, first: str, then: str) -> None:
        self.first, self.then = first, then
        self.num_asked = 0

    def __call__(self, host: str, port: int) -> Sequence[str]:
        self.num_asked += 1
        return [self.first if self.num_asked == 1 else self.then]


def test_a_name_that_changes_between_check_and_connection_is_asked_for_once() -> None:
    """127.0.0.1 is the allowed address here, and 127.0.0.2 the one that must not be reached."""
    with receiver() as outer, socket.create_server(("127.0.0.2", outer.port)) as inner:
        inner.settimeout(0.2)
        resolve = Rebinding("127.0.0.1", "127.0.0.2")
        sender = HttpWebhookSender(allowed=HERE, resolve=resolve)
        assert send(sender, f"http://hooks.example.com:{outer.port}/ok").status == 200
        assert resolve.num_asked == 1
        assert outer.received[0].headers["host"] == f"hooks.example.com:{outer.port}"
        again = send(sender, f"http://hooks.example.com:{outer.port}/ok")
        assert again.status is None and "public addresses alone" in str(again.error), "each delivery looks anew"
        with pytest.raises(TimeoutError):
            inner.accept()


def test_a_name_that_passed_the_check_at_its_creation_is_checked_at_each_delivery(there: Receiver) -> None:
    sender = HttpWebhookSender(resolve=Rebinding("8.8.8.8", "127.0.0.1"))
    sender.check(f"https://hooks.example.com:{there.port}/")
    assert "public addresses alone" in str(send(sender, f"https://hooks.example.com:{there.port}/").error)
    assert there.num_connections == 0


def test_a_resolver_that_hangs_holds_up_nobody_for_longer_than_the_rest_may_take() -> None:
    asked, released, answered = threading.Event(), threading.Event(), threading.Event()

    def hangs(host: str, port: int) -> Sequence[str]:
        asked.set()
        released.wait(120)
        answered.set()
        return ["8.8.8.8"]

    assert send(HttpWebhookSender(resolve=hangs, timeout_s=0.2), "https://hooks.example.com/").status is None
    assert asked.wait(60) and not answered.is_set()
    released.set()


def test_tls_verifies_the_name_and_not_the_address_that_was_connected_to(tmp_path: Path) -> None:
    server, trust = contexts(tmp_path, host="hooks.example.com")
    with receiver(tls=server) as there:
        sender = HttpWebhookSender(allowed=HERE, resolve=lambda h, p: ["127.0.0.1"], trust=lambda: trust)
        assert send(sender, f"https://hooks.example.com:{there.port}/ok").status == 200
        assert there.received[0].headers["host"] == f"hooks.example.com:{there.port}"
        other = send(sender, f"https://other.example.com:{there.port}/ok")
        assert other.status is None and "certificate was refused" in str(other.error)
        unknown = HttpWebhookSender(allowed=HERE, resolve=lambda h, p: ["127.0.0.1"])
        assert "certificate was refused" in str(send(unknown, f"https://hooks.example.com:{there.port}/ok").error)
        assert len(there.received) == 1


def test_the_next_address_is_tried_where_the_first_takes_no_connection(there: Receiver) -> None:
    both = parse_networks("127.0.0.0/8")
    sender = HttpWebhookSender(allowed=both, resolve=lambda h, p: ["127.0.0.9", "127.0.0.1"])
    assert send(sender, f"http://hooks.example.com:{there.port}/ok").status == 200


def test_the_system_resolves_addresses_and_names() -> None:
    assert "127.0.0.1" in system_resolve("localhost", 443)
    assert system_resolve("0x7f.1", 443) == ["127.0.0.1"]
