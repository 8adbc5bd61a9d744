"""A Hub that does harm gets the tenant's token to nobody else, writes nothing outside of its folder, and fills no disk."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from control_plane.models.model_fetch import fetch_model
from core.errors import FtError, InvalidRequest
from engine.data.readers.hub import hub_client
from engine.data.readers.hub.hub_dataset import HubId, fetch_from_hub
from engine.data.readers.hub.hub_session import guard_hub_session
from ft_client.hub_upload import Refused, Upload, upload
from tests.support.servers.raw_server import RawServer, raw_server

SHA = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_of_the_tenant"
LINE = b'{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n'
MOST_BYTES = 64 << 20
Piece = Iterator[bytes]


def listed(path: str, content: bytes = LINE, *, size: int | None = None, **more: Any) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    return {"type": "file", "path": path, "size": len(content) if size is None else size, "oid": blob, **more}


class Hub:
    """What a hostile Hub lists and sends; a test changes it. Another server, which must get no token, is at `other`."""

    def __init__(self) -> None:
        self.files: list[dict[str, Any]] = [listed("train.jsonl")]
        self.content = LINE
        self.endless = False
        """Whether the content goes on after what its length says."""
        self.elsewhere = ""
        """Where files are."""
        self.next_page = ""
        self.page: tuple[int, bytes] | None = None
        """Status and text of every answer."""
        self.server: RawServer
        self.other: RawServer

    def __call__(self, line: str) -> Any:
        method, path = line.split(" ")[:2]
        if self.page is not None:
            return self.reply(self.page[1], status=self.page[0], kind="text/html")
        if "/tree/" in path:
            more = {"Link": f'<{self.next_page}>; rel="next"'} if self.next_page else {}
            return self.reply(json.dumps(self.files).encode(), **more)
        if path.startswith("/api/") and method == "GET":
            return self.reply(json.dumps({"id": "acme/cards", "sha": SHA, "siblings": [], "private": True, "tags": []}).encode())
        if method == "POST":
            return self.reply(json.dumps(self.pushed(path)).encode())
        head = {"X-Repo-Commit": SHA, "ETag": f'"{hashlib.sha256(self.content).hexdigest()}"'}
        if self.elsewhere:
            linked = {"X-Linked-Size": str(len(self.content)), "X-Linked-Etag": head["ETag"], "Location": self.elsewhere}
            return self.reply(b"", status=302, **head, **linked)
        return self.reply(b"" if method == "HEAD" else self.content, length=None if self.endless else len(self.content), **head)

    def reply(self, body: bytes, *, status: int = 200, kind: str = "application/json", length: int | None = -1, **headers: str) -> Piece:
        size = [] if length is None else [f"Content-Length: {len(body) if length < 0 else length}"]
        fields = [f"HTTP/1.1 {status} X", f"Content-Type: {kind}", "Connection: close", *size, *(f"{k}: {v}" for k, v in headers.items())]
        yield ("\r\n".join(fields) + "\r\n\r\n").encode() + body
        while length is None:
            yield b"x" * 65536

    def pushed(self, path: str) -> dict[str, Any]:
        """Answers to a push, whose large file is to go to the other server, and to be verified there."""
        if "/preupload/" in path:
            return {"files": [{"path": "adapter.safetensors", "uploadMode": "lfs", "shouldIgnore": False}]}
        if path.endswith("/objects/batch"):
            oid = json.loads(self.server.requests[-1].partition(b"\r\n\r\n")[2])["objects"][0]
            there = f"http://localhost:{self.other.port}"
            actions = {"upload": {"href": f"{there}/put"}, "verify": {"href": f"{there}/verify"}}
            return {"transfer": "basic", "objects": [{**oid, "actions": actions}]}
        return {"url": f"{self.server.url}/acme/mine", "success": True, "commitOid": SHA, "commitUrl": f"{self.server.url}/acme/mine"}

    def fetch(self, where: Path, **more: Any) -> Path:
        wanted = HubId(repo="acme/cards", revision=SHA, **more)
        return fetch_from_hub(wanted, where, endpoint=self.server.url, token=TOKEN, max_bytes=10**9).path

    def fetch_model(self, where: Path) -> Path:
        return fetch_model("acme/cards", SHA, where, endpoint=self.server.url, wait=lambda _: None).directory

    def tokens(self, server: RawServer) -> list[bool]:
        return [TOKEN.encode() in request for request in server.requests]


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    with ExitStack() as servers:
        made.server = servers.enter_context(raw_server(made))
        made.other = servers.enter_context(raw_server(lambda line: made.reply(made.content if "GET" in line else b"{}")))
        yield made


def test_a_file_is_fetched_as_it_is_listed(hub: Hub, tmp_path: Path) -> None:
    assert hub.fetch(tmp_path / "a").read_bytes() == LINE
    assert all(hub.tokens(hub.server))


def test_a_file_that_is_elsewhere_is_fetched_without_the_token(hub: Hub, tmp_path: Path) -> None:
    hub.elsewhere = f"http://localhost:{hub.other.port}/object"
    assert hub.fetch(tmp_path / "a").read_bytes() == LINE
    assert hub.other.requests and not any(hub.tokens(hub.other))


def test_a_page_of_the_listing_that_is_elsewhere_is_asked_for_without_the_token(hub: Hub, tmp_path: Path) -> None:
    hub.next_page = f"http://localhost:{hub.other.port}/page"
    with pytest.raises(FtError):
        hub.fetch(tmp_path / "a")
    assert hub.other.requests and not any(hub.tokens(hub.other))


def test_a_push_hands_the_token_to_the_hub_alone(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "adapter.safetensors").write_bytes(b"weights" * 100)
    request = Upload(endpoint=hub.server.url, token=TOKEN, repo="acme/mine", directory=str(tmp_path), message="m", private=True)
    answer = upload(request, timeout_s=120)
    lines = [request.split(b" HTTP", 1)[0] for request in hub.other.requests]
    assert lines == [b"PUT /put", b"POST /verify"], answer
    assert any(hub.tokens(hub.server)) and not any(hub.tokens(hub.other))


def test_a_page_in_place_of_an_answer_is_not_repeated_with_what_it_holds(hub: Hub, tmp_path: Path) -> None:
    hub.page = (500, b"<html><h1>Error</h1><pre>AWS_SECRET=swordfish authorization: Bearer " + TOKEN.encode() + b"</pre></html>")
    with pytest.raises(FtError) as refused:
        hub.fetch(tmp_path / "a")
    (tmp_path / "b").mkdir()
    pushed = upload(
        Upload(endpoint=hub.server.url, token=TOKEN, repo="a/b", directory=str(tmp_path / "b"), message="m", private=True), timeout_s=120
    )
    assert isinstance(pushed, Refused)
    assert not [text for text in (refused.value.message, pushed.detail) if TOKEN in text or "swordfish" in text]


PATHS = ["../train.jsonl", "../../../../etc/train.jsonl", "/etc/train.jsonl", "data/../../train.jsonl", "a/../../../b/train.jsonl",
         "train\0.jsonl", "..\\train.jsonl", ".home/../../train.jsonl"]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_a_path_leads_nowhere_else(hub: Hub, tmp_path: Path, path: str) -> None:
    (tmp_path / "in/side").mkdir(parents=True)
    hub.files = [listed(path)]
    with pytest.raises(FtError):
        hub.fetch(tmp_path / "in/side")
    outside = [p for p in tmp_path.rglob("*") if p.is_file() and "side" not in p.parts]
    assert outside == []


def test_a_link_in_the_repository_is_a_file_that_holds_its_text(hub: Hub, tmp_path: Path) -> None:
    """Git stores a link as a blob with the path that it points to."""
    hub.content = b"/etc/passwd"
    hub.files = [listed("train.jsonl", hub.content, mode="120000")]
    got = hub.fetch(tmp_path / "a")
    assert (got.is_symlink(), got.read_bytes()) == (False, b"/etc/passwd")


def test_a_file_of_another_revision_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.content = LINE.replace(b'"a"', b'"b"')
    with pytest.raises(FtError, match="not those of the commit"):
        hub.fetch(tmp_path / "a")


@pytest.mark.parametrize("size", [1, len(LINE) - 1, len(LINE) + 1, 10**8], ids=["1", "one less", "one more", "more"])
def test_a_size_that_is_not_the_files_is_refused(hub: Hub, tmp_path: Path, size: int) -> None:
    hub.files = [listed("train.jsonl", size=size)]
    with pytest.raises(FtError, match="not those of the commit"):
        hub.fetch(tmp_path / "a")


@pytest.mark.parametrize("what", ["a dataset", "a card", "a model"])
def test_a_body_without_an_end_fills_no_disk(hub: Hub, tmp_path: Path, what: str) -> None:
    hub.endless = True
    begun = time.monotonic()
    names = {
        "a dataset": ["train.jsonl"],
        "a card": ["train.jsonl", "README.md"],
        "a model": ["config.json", "tokenizer.json", "model.safetensors"],
    }
    hub.files = [listed(name) for name in names[what]]
    with pytest.raises(FtError):
        hub.fetch_model(tmp_path) if what == "a model" else hub.fetch(tmp_path / "a")
    assert time.monotonic() - begun < 100
    assert sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()) < 4 << 20
    assert hub.server.num_bytes < MOST_BYTES


@pytest.mark.slow
def test_a_listing_without_an_end_takes_no_more_memory_than_is_allowed(tmp_path: Path) -> None:
    endless = itertools.chain([b'HTTP/1.1 200 OK\r\n\r\n{"a": "'], itertools.repeat(b"x" * 65536))
    with raw_server(lambda _: endless) as server:
        request = hub_client.HubRequest(op="sha", repo="acme/cards", revision=SHA, endpoint=server.url, token=None)
        answer = hub_client.ask_hub(request, home=tmp_path, timeout_s=300)
        assert answer.error == "unreachable" and server.num_bytes < hub_client.MEMORY_BYTES


REFERRED = {
    "http://127.0.0.1/": False, "http://169.254.169.254/latest": False, "http://[::ffff:10.0.0.1]/": False, "http://localhost:9/": False,
    "https://[fd00::1]/": False, "http://2130706433/": False, "https://8.8.4.4/object": True,
    "http://[64:ff9b::a00:1]/": False, "http://[2002:a00:1::]/": False, "http://[::a00:1]/": False, "http://192.0.0.9/": False,
    "http://224.0.0.1/": False, "https://[2001:4860:4860::8888]/object": True,
}  # fmt: skip


@pytest.mark.parametrize("url", REFERRED)
def test_a_public_hub_refers_to_public_addresses(url: str) -> None:
    check, request = (
        guard_hub_session("https://8.8.8.8"),
        httpx.Request("GET", url, headers={"authorization": f"Bearer {TOKEN}", "cookie": "a=b"}),
    )
    if REFERRED[url]:
        check(request)
    else:
        with pytest.raises(InvalidRequest) as refused:
            check(request)
        assert refused.value.code == "hub_address_refused"
    assert {"authorization", "cookie"}.isdisjoint(request.headers)
    guard_hub_session("http://127.0.0.1:8080")(httpx.Request("GET", url))


@pytest.mark.parametrize(
    ("url", "keeps"),
    [("https://hub.example/x", True), ("https://HUB.example:443/x", True), ("http://hub.example/x", False),
     ("https://hub.example:8443/x", False),
     ("https://hub.example.evil.example/x", False), ("https://hub.example@evil.example/x", False),
     ("https://evil.example/hub.example", False)],
)  # fmt: skip
def test_the_token_is_for_one_origin(url: str, keeps: bool) -> None:
    request = httpx.Request("GET", url, headers={"authorization": f"Bearer {TOKEN}"})
    guard_hub_session("https://hub.example")(request)
    assert ("authorization" in request.headers) == keeps
