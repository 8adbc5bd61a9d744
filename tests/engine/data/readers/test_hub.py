"""Datasets of a Hub: the real client talks to a server that speaks the Hub's protocol, on this machine."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.errors import Fault, FtError, IntegrityError, InvalidRequest, NotFound, Unavailable
from engine.data.readers.hub.hub_dataset import HubFile, HubId, fetch_from_hub, parse_hub_id
from engine.data.readers.hub.hub_files import pick
from engine.data.readers.row_stream import open_rows
from tests.engine.data.examples_of import chat

SHA = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_of_the_tenant"


class Hub(ThreadingHTTPServer):
    """A Hub with a few repositories; it writes down what it is asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.large: set[str] = set()
        """Paths that are stored elsewhere (LFS) and answered with a redirect."""
        self.gated: set[str] = set()
        self.private: set[str] = set()
        self.spoiled: set[str] = set()
        """Paths whose bytes are not those of the commit."""
        self.asked: list[tuple[str, str, str | None]] = []
        self.down = False

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append((self.command, path, self.headers.get("Authorization")))
        if self.server.down:
            return self.reply(503, b"", {})
        if path.startswith("/cdn/"):
            repo, _, name = path.removeprefix("/cdn/").partition("/-/")
            return self.reply(200, self.bytes_of(repo, name), {})
        parts = path.strip("/").split("/")
        api = parts[:2] == ["api", "datasets"]
        repo = "/".join(parts[2:4] if api else parts[1:3])
        rest = parts[4:] if api else parts[3:]
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo in self.server.gated and not allowed and not (api and rest[0] == "revision"):
            return self.reply(403, b"", {"X-Error-Code": "GatedRepo"})
        if repo not in self.server.repos or (repo in self.server.private and not allowed):
            return self.reply(404 if allowed else 401, b"", {"X-Error-Code": "RepoNotFound"})
        if rest[1] not in (SHA, "main"):
            return self.reply(404, b"", {"X-Error-Code": "RevisionNotFound"})
        if rest[0] == "revision":
            body = {"id": repo, "sha": SHA, "siblings": [], "private": False, "tags": [], "downloads": 0, "likes": 0, "disabled": False}
            return self.json(body)
        if rest[0] == "tree":
            return self.json([self.listed(repo, name) for name in sorted(self.server.repos[repo])])
        name = "/".join(rest[2:])
        if name not in self.server.repos[repo]:
            return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        content = self.server.repos[repo][name]
        etag = {"X-Repo-Commit": SHA, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        if name in self.server.large:
            linked = {"X-Linked-Etag": etag["ETag"], "X-Linked-Size": str(len(content))}
            return self.reply(
                302, b"", {**etag, **linked, "Location": f"http://localhost:{self.server.server_address[1]}/cdn/{repo}/-/{name}"}
            )
        return self.reply(200, self.bytes_of(repo, name), etag)

    def bytes_of(self, repo: str, name: str) -> bytes:
        content = self.server.repos[repo][name]
        return content[::-1] if name in self.server.spoiled else content

    def listed(self, repo: str, name: str) -> dict[str, object]:
        content = self.server.repos[repo][name]
        entry: dict[str, object] = {"type": "file", "path": name, "size": len(content)}
        entry["oid"] = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        if name in self.server.large:
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return entry

    def json(self, body: object) -> None:
        self.reply(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def lines(*names: str) -> bytes:
    return b"".join(json.dumps(chat(name, "a")).encode() + b"\n" for name in names)


def asked_of(got: HubFile) -> list[str]:
    return [row.value["messages"][0]["content"] for row in open_rows(got.path, filename=got.filename).rows]


def hub_id(repo: str = "acme/cards", **more: str) -> HubId:
    return HubId(repo=repo, revision=SHA, **more)


IDS = {
    f"hf://acme/cards@{SHA}": hub_id(),
    f"hf://datasets/acme/cards@{SHA.upper()}:test": hub_id(split="test"),
    f"hf://datasets/squad@{SHA}": hub_id("squad"),
    f"hf://acme/cards@{SHA}/main": hub_id(config="main"),
    f"hf://acme/cards@{SHA}/main:validation": hub_id(config="main", split="validation"),
    f"hf://acme/cards@{SHA}/data/en:test": hub_id(config="data/en", split="test"),
    f"hf://acme/cards@{SHA}/data/train.jsonl.gz": hub_id(path="data/train.jsonl.gz"),
}


@pytest.mark.parametrize("text", IDS)
def test_an_id_says_repository_commit_configuration_and_split(text: str) -> None:
    assert parse_hub_id(text) == IDS[text]
    assert parse_hub_id(str(IDS[text])) == IDS[text]


@pytest.mark.parametrize(
    "text",
    ["hf://", "hf://acme", f"hf://acme/cards@{SHA}/../x", f"hf://../cards@{SHA}", f"hf://acme/cards@{SHA}:", f"hf://a b/c@{SHA}",
     f"https://x/acme/cards@{SHA}", f"hf://acme/cards@{SHA}/a.jsonl:train"],
)  # fmt: skip
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_hub_id(text)
    assert caught.value.code == "invalid_hub_id"


@pytest.mark.parametrize(
    "text", ["hf://acme/cards", "hf://acme/cards@main", "hf://datasets/acme/cards@v1:test", f"hf://acme/cards@{SHA[:12]}"]
)
def test_an_id_without_a_commit_is_refused_with_how_to_pin_it(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_hub_id(text)
    assert caught.value.code == "hub_revision_not_pinned"
    assert "write hf://acme/cards@ and the 40 digits of a commit" in caught.value.message


def test_the_refusal_names_the_commit_of_today_where_the_hub_can_be_asked(hub: Hub, tmp_path: Path) -> None:
    hub.repos["acme/cards"] = {}
    with pytest.raises(InvalidRequest) as caught:
        parse_hub_id("hf://acme/cards@main", endpoint=hub.endpoint, scratch=tmp_path)
    assert f"it is {SHA} now; write hf://acme/cards@{SHA}" in caught.value.message
    hub.repos.clear()
    with pytest.raises(InvalidRequest, match="40 digits"):
        parse_hub_id("hf://acme/cards@main", endpoint=hub.endpoint, scratch=tmp_path)


def test_shards_of_lines_are_joined_in_order_and_large_files_come_by_their_redirect(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # of the machine: the platform's own endpoint is asked nevertheless
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_machine")
    hub.repos["acme/cards"] = {
        "README.md": b"# Cards\n",
        "data/train-00001-of-00002.jsonl.gz": gzip.compress(lines("c")),
        "data/train-00000-of-00002.jsonl.gz": gzip.compress(lines("a", "b").rstrip()),
        "data/test-00000-of-00001.jsonl": lines("t"),
    }
    hub.large = {"data/train-00000-of-00002.jsonl.gz"}
    got = fetch_from_hub(hub_id(), tmp_path, endpoint=hub.endpoint + "/")
    assert asked_of(got) == ["a", "b", "c"]
    assert got.sources == ("data/train-00000-of-00002.jsonl.gz", "data/train-00001-of-00002.jsonl.gz")
    assert got.filename == "train.jsonl"
    assert any(path.startswith("/cdn/") for _, path, _ in hub.asked), "the redirect was followed"
    assert {token for _, _, token in hub.asked} == {None}, "the machine's own token is nobody's business"
    assert asked_of(fetch_from_hub(hub_id(split="test"), tmp_path, endpoint=hub.endpoint)) == ["t"]


def test_shards_of_parquet_are_one_file_of_all_rows(hub: Hub, tmp_path: Path) -> None:
    files = {}
    for number, names in enumerate((["a", "b"], ["c"])):
        extra = {"score": [1] * len(names)} if number else {}
        pq.write_table(pa.table({"messages": [chat(n, "x")["messages"] for n in names], **extra}), tmp_path / "shard")
        files[f"main/train-0000{number}-of-00002.parquet"] = (tmp_path / "shard").read_bytes()
    hub.repos["acme/cards"] = files
    got = fetch_from_hub(hub_id(config="main"), tmp_path, endpoint=hub.endpoint)
    assert asked_of(got) == ["a", "b", "c"]
    assert [r.value.get("score") for r in open_rows(got.path, filename=got.filename).rows] == [None, None, 1]


def test_shards_of_csv_have_one_header(hub: Hub, tmp_path: Path) -> None:
    hub.repos["acme/cards"] = {"train_1.csv": b"prompt,completion\na,x\n", "train_2.csv": b"prompt,completion\r\nb,y"}
    got = fetch_from_hub(hub_id(), tmp_path, endpoint=hub.endpoint)
    assert [r.value for r in open_rows(got.path, filename=got.filename).rows] == [
        {"prompt": "a", "completion": "x"}, {"prompt": "b", "completion": "y"},
    ]  # fmt: skip
    hub.repos["acme/other"] = {"train_1.csv": b"prompt,completion\na,x\n", "train_2.csv": b"completion,prompt\nb,y\n"}
    with pytest.raises(InvalidRequest, match="another header"):
        fetch_from_hub(hub_id("acme/other"), tmp_path / "other", endpoint=hub.endpoint)


def test_one_file_is_read_as_it_is_and_downloaded_once(hub: Hub, tmp_path: Path) -> None:
    hub.repos["acme/cards"] = {"a.jsonl": lines("a"), "b.jsonl": lines("b")}
    for _ in range(2):
        got = fetch_from_hub(hub_id(path="b.jsonl"), tmp_path, endpoint=hub.endpoint)
        assert asked_of(got) == ["b"]
        assert (got.filename, got.num_bytes) == ("b.jsonl", len(lines("b")))
    assert len([1 for method, path, _ in hub.asked if method == "GET" and "/resolve/" in path]) == 1


def test_a_private_dataset_is_read_with_the_tenants_token(hub: Hub, tmp_path: Path) -> None:
    hub.repos["acme/cards"] = {"train.jsonl": lines("a")}
    hub.private = {"acme/cards"}
    with pytest.raises(NotFound, match="if it is private, give a token"):
        fetch_from_hub(hub_id(), tmp_path, endpoint=hub.endpoint)
    assert asked_of(fetch_from_hub(hub_id(), tmp_path, endpoint=hub.endpoint, token=TOKEN)) == ["a"]
    assert {token for _, path, token in hub.asked if "/resolve/" in path} == {f"Bearer {TOKEN}"}


def refusal(hub: Hub, wanted: HubId, where: Path, *, endpoint: str | None = None, max_bytes: int = 10**9) -> FtError:
    with pytest.raises(FtError) as caught:
        fetch_from_hub(wanted, where, endpoint=endpoint or hub.endpoint, max_bytes=max_bytes)
    return caught.value


def test_every_refusal_says_what_to_do(hub: Hub, tmp_path: Path) -> None:
    hub.repos["acme/cards"] = {"train.jsonl": lines("a"), "test.jsonl": lines("b")}
    hub.repos["acme/gated"] = {"train.jsonl": lines("a")}
    hub.repos["acme/empty"] = {"README.md": b"# nothing"}
    hub.gated = {"acme/gated"}
    told = {
        "absent": refusal(hub, hub_id("acme/none"), tmp_path),
        "gated": refusal(hub, hub_id("acme/gated"), tmp_path),
        "revision": refusal(hub, HubId(repo="acme/cards", revision="f" * 40), tmp_path),
        "split": refusal(hub, hub_id(split="validation"), tmp_path),
        "no data": refusal(hub, hub_id("acme/empty"), tmp_path),
        "large": refusal(hub, hub_id(), tmp_path, max_bytes=10),
    }
    assert {name: error.code for name, error in told.items()} == {
        "absent": "hub_dataset_not_found",
        "gated": "hub_dataset_gated",
        "revision": "hub_revision_not_found",
        "split": "hub_split_not_found",
        "no data": "hub_split_not_found",
        "large": "file_too_large",
    }
    assert all(error.fault is Fault.USER for error in told.values())
    assert "available: test, train" in told["split"].message
    assert f"accept its terms at {hub.endpoint}/datasets/acme/gated" in told["gated"].message
    assert f"has no commit {'f' * 40}" in told["revision"].message


def test_a_platform_without_a_hub_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        fetch_from_hub(hub_id(), tmp_path, endpoint=None)
    assert caught.value.code == "hub_disabled"


def test_a_hub_that_does_not_answer_is_no_fault_of_the_tenant(tmp_path: Path) -> None:
    with pytest.raises(Unavailable) as caught:
        fetch_from_hub(hub_id(), tmp_path, endpoint="http://127.0.0.1:9")
    assert (caught.value.code, caught.value.fault) == ("hub_unavailable", Fault.PLATFORM)


@pytest.mark.parametrize("large", [True, False])
def test_bytes_that_are_not_those_of_the_commit_are_refused(hub: Hub, tmp_path: Path, large: bool) -> None:
    hub.repos["acme/cards"] = {"train.jsonl": lines("a")}
    hub.large = {"train.jsonl"} if large else set()
    hub.spoiled = {"train.jsonl"}
    with pytest.raises(IntegrityError, match="not those of the commit"):
        fetch_from_hub(hub_id(), tmp_path, endpoint=hub.endpoint)
    hub.spoiled = set()
    assert asked_of(fetch_from_hub(hub_id(), tmp_path, endpoint=hub.endpoint)) == ["a"]


CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: [main/test-*, extra/**/*.jsonl]
- config_name: socratic
  data_dir: socratic
---
# Cards
"""
LAYOUTS: dict[str, tuple[list[str], str, dict[str, str | None], list[str]]] = {
    "one file": (["README.md", "rows.jsonl"], "", {}, ["rows.jsonl"]),
    "splits by name": (["train.jsonl", "valid.jsonl"], "", {"split": "validation"}, ["valid.jsonl"]),
    "splits by folder": (["train/0.jsonl", "train/1.jsonl", "dev/0.jsonl"], "", {}, ["train/0.jsonl", "train/1.jsonl"]),
    "shards with a name of their own": (
        ["data/train_sft-00000-of-00001.parquet", "data/test_sft-00000-of-00001.parquet"],
        "",
        {"split": "train_sft"},
        ["data/train_sft-00000-of-00001.parquet"],
    ),
    "a folder as configuration": (
        ["harmless-base/train.jsonl.gz", "harmless-base/test.jsonl.gz", "helpful-base/train.jsonl.gz"],
        "",
        {"config": "harmless-base"},
        ["harmless-base/train.jsonl.gz"],
    ),
    "a word inside another": (["constraints.jsonl", "dataset_infos.json"], "", {}, ["constraints.jsonl"]),
    "a card's split": (["main/train-0.parquet", "socratic/train-0.parquet"], CARD, {"config": "main"}, ["main/train-0.parquet"]),
    "a card's patterns": (
        ["main/test-0.jsonl", "main/train-0.jsonl", "extra/a/b.jsonl"],
        CARD,
        {"config": "main", "split": "test"},
        ["extra/a/b.jsonl", "main/test-0.jsonl"],
    ),
    "a card's folder": (["main/train-0.parquet", "socratic/train-0.parquet"], CARD, {"config": "socratic"}, ["socratic/train-0.parquet"]),
    "a file by its path": (["a.jsonl", "b.csv"], "", {"path": "b.csv"}, ["b.csv"]),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_the_files_of_a_split_are_found_by_the_layout_of_the_repository(case: str) -> None:
    paths, card, wanted, found = LAYOUTS[case]
    asked = {"config": None, "path": None, "split": "train", **wanted}
    assert pick(paths, card, config=asked["config"], path=asked["path"], split=asked["split"] or "") == found


CHOICES: dict[str, tuple[list[str], str, dict[str, str | None], str]] = {
    "several configurations": (["a/train.jsonl", "b/train.jsonl"], "", {}, "hub_files_ambiguous"),
    "several formats": (["train.jsonl", "train.csv"], "", {}, "hub_files_ambiguous"),
    "several configurations of a card": (["main/train-0.parquet"], CARD, {}, "hub_files_ambiguous"),
    "an unknown configuration": (["a/train.jsonl"], "", {"config": "c"}, "hub_split_not_found"),
    "an unknown configuration of a card": (["main/train-0.parquet"], CARD, {"config": "c"}, "hub_split_not_found"),
    "an unknown file": (["train.jsonl"], "", {"path": "c.jsonl"}, "hub_split_not_found"),
    "a card that is no YAML": (["train.jsonl"], "---\n: [\n---\n", {"split": "test"}, "hub_split_not_found"),
}


@pytest.mark.parametrize("case", CHOICES)
def test_what_is_absent_or_ambiguous_is_refused_with_the_choices(case: str) -> None:
    paths, card, wanted, code = CHOICES[case]
    asked = {"config": None, "path": None, "split": "train", **wanted}
    with pytest.raises(FtError) as caught:
        pick(paths, card, config=asked["config"], path=asked["path"], split=asked["split"] or "")
    assert caught.value.code == code
    assert any(name in caught.value.message for name in (*paths, "main", "train", "a")), "it names what there is"
