"""A base model comes from a Hub once, whole, and without anything that could run."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane.models.model_fetch import Fetched, fetch_model
from core.base_models import model_digest
from core.errors import FtError, IntegrityError, InvalidRequest, NotFound
from tests.support.models.tiny_model import build_tiny_model
from tests.support.servers.model_hub import SHA, TOKEN, ModelHub, running_model_hub

REPO = "acme/tiny"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def hub(tiny: Path) -> Iterator[ModelHub]:
    with running_model_hub() as server:
        files = {p.name: p.read_bytes() for p in tiny.iterdir()}
        more = {"README.md": b"---\nlicense: mit\n---\n# Tiny\n", "pytorch_model.bin": b"pickle", "modeling.py": b"raise SystemExit"}
        server.repos[REPO] = {**files, **more, "original/consolidated.00.pth": b"pickle"}
        yield server


def fetch(hub: ModelHub, home: Path, *, repo: str = REPO, revision: str = SHA, token: str | None = None) -> Fetched:
    return fetch_model(repo, revision, home / "models", endpoint=hub.endpoint, token=token)


def test_only_weights_tokenizer_and_config_are_fetched(hub: ModelHub, tiny: Path, tmp_path: Path) -> None:
    made = fetch(hub, tmp_path)
    assert model_digest(made.directory) == model_digest(tiny)
    assert made.license == "mit"
    names = {p.name for p in made.directory.rglob("*")} - {".fetched.json"}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def test_a_model_is_fetched_once_also_when_many_ask_at_the_same_time(hub: ModelHub, tmp_path: Path) -> None:
    made: list[Fetched] = []
    threads = [threading.Thread(target=lambda: made.append(fetch(hub, tmp_path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({m.directory for m in made}) == 1
    assert sorted(m.num_bytes > 0 for m in made) == [False, False, True]
    assert len([a for a in hub.asked if a[0] == "GET" and a[1].startswith("/cdn/")]) == 1


def test_a_transfer_that_broke_off_goes_on_where_it_was(hub: ModelHub, tiny: Path, tmp_path: Path) -> None:
    hub.break_after = {"model.safetensors": 5000}
    made = fetch(hub, tmp_path)
    assert hub.transfers("model.safetensors")[-1] == "bytes=5000-"
    assert model_digest(made.directory) == model_digest(tiny)


def test_bytes_that_are_not_the_commits_are_refused_and_fetched_again(hub: ModelHub, tiny: Path, tmp_path: Path) -> None:
    hub.spoiled = {"model.safetensors"}
    with pytest.raises(IntegrityError, match=r"model\.safetensors of acme/tiny"):
        fetch(hub, tmp_path)
    hub.spoiled = set()
    assert model_digest(fetch(hub, tmp_path).directory) == model_digest(tiny)


def test_the_index_says_which_shards_are_the_model(hub: ModelHub, tmp_path: Path) -> None:
    files = hub.repos[REPO]
    weights = files.pop("model.safetensors")
    files |= {"model-00001-of-00001.safetensors": weights, "consolidated.safetensors": weights}
    files["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}).encode()
    made = fetch(hub, tmp_path)
    assert [p.name for p in made.directory.glob("*.safetensors")] == ["model-00001-of-00001.safetensors"]
    files["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": "../../evil.safetensors"}}).encode()
    with pytest.raises(InvalidRequest, match="evil"):
        fetch(hub, tmp_path / "other")


@pytest.mark.parametrize(
    ("repo", "revision", "code"),
    [
        (REPO, "main", "hub_revision_not_pinned"), (REPO, "f" * 40, "hub_revision_not_found"), ("acme/none", SHA, "hub_model_not_found"),
        ("acme", SHA, "invalid_hub_id"), ("../etc", SHA, "invalid_hub_id"), ("acme/..", SHA, "invalid_hub_id"),
    ],
)  # fmt: skip
def test_what_is_not_a_pinned_model_is_refused(hub: ModelHub, tmp_path: Path, repo: str, revision: str, code: str) -> None:
    with pytest.raises(FtError) as refused:
        fetch(hub, tmp_path, repo=repo, revision=revision)
    assert refused.value.code == code


def test_a_model_that_has_only_pickles_is_refused(hub: ModelHub, tmp_path: Path) -> None:
    del hub.repos[REPO]["model.safetensors"]
    with pytest.raises(InvalidRequest, match=r"consolidated\.00\.pth") as refused:
        fetch(hub, tmp_path)
    assert refused.value.code == "unsafe_weights"


def test_a_private_model_needs_the_token_which_other_hosts_are_not_told(hub: ModelHub, tmp_path: Path) -> None:
    hub.private = {REPO}
    with pytest.raises(NotFound):
        fetch(hub, tmp_path)
    assert fetch(hub, tmp_path, token=TOKEN).num_bytes > 0
    assert {asked[2] for asked in hub.asked if asked[1].startswith("/cdn/")} == {None}


@pytest.mark.parametrize(
    ("status", "code"),
    [(401, "hub_model_gated"), (403, "hub_model_gated"), (404, "hub_model_not_found"), (416, "hub_model_unusable")],
)
def test_a_refusal_that_stays_one_is_told_at_once(hub: ModelHub, tmp_path: Path, status: int, code: str) -> None:
    hub.refused = {"tokenizer.json": [status] * 9}
    waited: list[float] = []
    with pytest.raises(FtError) as refused:
        fetch_model(REPO, SHA, tmp_path, endpoint=hub.endpoint, wait=waited.append)
    assert (refused.value.code, waited, len(hub.transfers("tokenizer.json"))) == (code, [], 1)


def test_a_hub_that_is_busy_is_asked_again_after_longer_and_longer_pauses(hub: ModelHub, tmp_path: Path) -> None:
    hub.refused = {"tokenizer.json": [429, 503, 500]}
    waited: list[float] = []
    fetch_model(REPO, SHA, tmp_path, endpoint=hub.endpoint, wait=waited.append)
    assert waited == [1.0, 2.0, 4.0]
    hub.refused = {"tokenizer.json": [503] * 9}
    with pytest.raises(FtError) as refused:
        fetch_model(REPO, SHA, tmp_path / "again", endpoint=hub.endpoint, wait=waited.append)
    assert (refused.value.code, waited[3:]) == ("hub_unavailable", [1.0, 2.0, 4.0, 8.0])
