"""Bodies of ``POST /v1/files`` on the wire: who may not send is answered first, and what breaks off leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import anyio
import httpx
import openai
import pytest
from fastapi import Request

from control_plane.http.forms import Form, Pace
from control_plane.platform.context import Platform
from control_plane.tenants.rules import Tenant
from core.errors import InvalidRequest

BOUNDARY = "aBoundary"
PATIENCE_S = 20.0


def field(name: str, value: str) -> bytes:
    return f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()


def file_begins(name: str = "rows.jsonl") -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
    return f"{head}Content-Type: application/octet-stream\r\n\r\n".encode()


def whole(*parts: bytes) -> bytes:
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


@pytest.fixture
def post(api_url: str, api_key: str) -> Callable[[bytes], httpx.Response]:
    headers = {"authorization": f"Bearer {api_key}", "content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    return lambda body: httpx.post(f"{api_url}/v1/files", headers=headers, content=body, timeout=60)


@contextlib.contextmanager
def connected(url: str, *, key: str, num_bytes: int) -> Iterator[socket.socket]:
    """A connection on which the head of an upload of `num_bytes` was sent."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=PATIENCE_S) as made:
        made.sendall(
            f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nContent-Length: {num_bytes}\r\n"
            f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\nConnection: close\r\n\r\n".encode()
        )
        yield made


def answer(connection: socket.socket) -> str:
    """All that comes until the server closes."""
    received = b""
    with contextlib.suppress(ConnectionError, TimeoutError):
        while piece := connection.recv(1 << 16):
            received += piece
    return received.decode(errors="replace")


def objects_of(platform: Platform, tenant: Tenant) -> list[str]:
    return [o.key for o in platform.objects.list(f"tenants/{tenant.id}/files")]


def eventually(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_who_has_no_key_is_told_so_before_the_body_is_sent(api_url: str) -> None:
    with connected(api_url, key="ft-sk-wrong", num_bytes=10 << 30) as connection:
        said = answer(connection)
        assert said.startswith("HTTP/1.1 401 ")
        assert "connection: close" in said.lower()
        sent = 0
        with contextlib.suppress(ConnectionError, TimeoutError):
            while sent < 256 << 20:
                sent += connection.send(bytes(1 << 20))
        assert sent < 256 << 20  # nobody reads it


def test_what_the_fields_are_refused_for_is_said_before_the_file_is_sent(api_url: str, api_key: str) -> None:
    with connected(api_url, key=api_key, num_bytes=10 << 30) as connection:
        connection.sendall(field("purpose", "vision") + file_begins() + b"{")
        said = answer(connection)
    assert said.startswith("HTTP/1.1 400 ")
    assert '"invalid_purpose"' in said


@pytest.mark.parametrize("sent", [b"", b"{" * (3 << 20)], ids=["at its beginning", "in its middle"])
def test_a_sender_that_goes_away_in_the_file_leaves_nothing(
    api_url: str, api_key: str, platform: Platform, tenant: Tenant, client: openai.OpenAI, sent: bytes
) -> None:
    staged = platform.settings.home / "objects" / ".staging"
    with connected(api_url, key=api_key, num_bytes=1 << 30) as connection:
        connection.sendall(field("purpose", "fine-tune") + file_begins() + sent)
        eventually(lambda: list(staged.iterdir()))
    eventually(lambda: not list(staged.iterdir()))
    assert objects_of(platform, tenant) == []
    assert list(client.files.list()) == []


def test_fields_may_follow_the_file(
    post: Callable[[bytes], httpx.Response], platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path]
) -> None:
    rows = write_chat_rows().read_bytes()
    made = post(whole(file_begins(), rows, b"\r\n", field("policies[pii]", "warn"), field("purpose", "fine-tune")))
    assert (made.status_code, made.json()["status"], made.json()["policies"]) == (200, "processed", {"pii": "warn"})
    assert platform.objects.get_bytes(objects_of(platform, tenant)[0]) == rows


@pytest.mark.parametrize(
    ("behind", "code", "param"),
    [
        (field("purpose", "vision"), "invalid_purpose", "purpose"),
        (b"", "missing_required_parameter", "purpose"),
        (field("purpose", "fine-tune") + field("column_map", "no json"), "invalid_column_map", "column_map"),
        (field("purpose", "fine-tune") + field("model", "gpt-5"), "model_not_found", "model"),
        (field("purpose", "fine-tune") + field("policies", '{"pii": 7}'), "invalid_policy", "policies"),
        (field("purpose", "fine-tune") + file_begins("b") + b"x\r\n", "invalid_multipart", "file"),
        (field("purpose", "fine-tune") + field("column_map", "y" * (1 << 21)), "invalid_multipart", None),
        (field("expires_after[anchor]", "now") + field("purpose", "fine-tune"), "invalid_expires_after", "expires_after"),
    ],
)
def test_what_is_refused_for_a_field_behind_the_file_leaves_no_bytes(
    post: Callable[[bytes], httpx.Response], platform: Platform, tenant: Tenant, behind: bytes, code: str, param: str | None
) -> None:
    refused = post(whole(file_begins(), b"{}\n" * 1000, b"\r\n", behind))
    error = refused.json()["error"]
    assert (refused.status_code // 100, error["code"]) == (4, code)
    assert error["param"] == param or param in (error["param"] or "")
    assert objects_of(platform, tenant) == []


def test_a_body_without_its_last_boundary_is_no_file(post: Callable[[bytes], httpx.Response], platform: Platform, tenant: Tenant) -> None:
    for body in (
        field("purpose", "fine-tune") + file_begins() + b"{}\n",
        field("purpose", "fine-tune") + file_begins() + b"{}\r\n--" + b"a",
    ):
        refused = post(body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_multipart")
    assert objects_of(platform, tenant) == []


def test_a_body_that_is_no_form_has_no_file(api_url: str, api_key: str) -> None:
    for headers in ({"content-type": "application/json"}, {}, {"content-type": "multipart/form-data"}):
        refused = httpx.post(f"{api_url}/v1/files", headers={"authorization": f"Bearer {api_key}", **headers}, content=b'{"file": 1}')
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] in ("missing_required_parameter", "invalid_multipart")


def test_a_boundary_in_pieces_and_within_the_file_is_told_apart(
    api_url: str, api_key: str, client: openai.OpenAI, write_chat_rows: Callable[..., Path]
) -> None:
    row = {
        "messages": [{"role": "user", "content": f"what is --{BOUNDARY} ?\r\n--{BOUNDARY[:-1]}"}, {"role": "assistant", "content": "it"}]
    }
    rows = write_chat_rows().read_bytes() + json.dumps(row).encode() + b"\r\n"
    body = whole(field("purpose", "fine-tune"), file_begins(), rows, b"\r\n")
    with connected(api_url, key=api_key, num_bytes=len(body)) as connection:
        for at in range(0, len(body), 997):
            connection.sendall(body[at : at + 997])
        said = answer(connection)
    assert said.startswith("HTTP/1.1 200 ")
    (file,) = client.files.list()
    assert client.files.content(file.id).read() == rows


def test_a_file_expires_when_its_sender_said_so(client: openai.OpenAI, write_chat_rows: Callable[..., Path]) -> None:
    path = write_chat_rows()
    file = client.files.create(file=path, purpose="fine-tune", expires_after={"anchor": "created_at", "seconds": 3600})
    assert client.files.retrieve(file.id).expires_at == file.created_at + 3600
    assert client.files.create(file=path, purpose="fine-tune").expires_at is None
    for seconds in (3599, 2_592_001):
        with pytest.raises(openai.BadRequestError) as refused:
            client.files.create(file=path, purpose="fine-tune", expires_after={"anchor": "created_at", "seconds": seconds})
        assert (refused.value.code, refused.value.param) == ("invalid_expires_after", "expires_after")


def test_a_list_takes_every_filter_of_the_client(client: openai.OpenAI, write_chat_rows: Callable[..., Path]) -> None:
    made = [client.files.create(file=write_chat_rows(3, salt=str(i)), purpose="fine-tune").id for i in range(3)]
    assert [f.id for f in client.files.list(purpose="fine-tune", limit=2, order="asc", after=made[0])] == made[1:]
    assert list(client.files.list(purpose="fine-tune-results")) == []
    with client.files.with_streaming_response.content(made[0]) as streamed:
        assert len(b"".join(streamed.iter_bytes())) == int(streamed.headers["content-length"])


class Trickle:
    """A request whose file comes byte by byte, and never to its end."""

    def __init__(self, pause_s: float) -> None:
        self.headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
        self._pause_s = pause_s

    async def stream(self) -> AsyncIterator[bytes]:
        yield file_begins()
        for _ in range(200):
            await anyio.sleep(self._pause_s)
            yield b"x"


@pytest.mark.parametrize(
    ("pace", "code"),
    [
        (Pace(idle_s=60, allowance_s=0.1, bytes_per_s=10_000), "upload_too_slow"),
        (Pace(idle_s=0.005, allowance_s=60), "upload_interrupted"),
    ],
)
def test_a_sender_that_is_too_slow_does_not_keep_its_thread(pace: Pace, code: str) -> None:
    async def scenario() -> None:
        form = Form(cast(Request, Trickle(0.01)), file_field="file", pace=pace)
        await form.to_file()
        await form.store(lambda stream: stream.read(), tenant="t")

    with pytest.raises(InvalidRequest) as refused:
        anyio.run(scenario)
    assert refused.value.code == code
