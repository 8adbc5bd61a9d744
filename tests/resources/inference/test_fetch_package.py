"""What a model server starts on: the registered bytes, or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.base_models import model_digest
from core.errors import IntegrityError
from engine.adapters import package, whole_model
from resources.inference import fetch_package
from resources.object_store import LocalObjectStore
from tests.support.models.tiny_adapter import build_tiny_adapter
from tests.support.models.tiny_model import build_tiny_model

PREFIX = "tenants/acme/adapters/adp-1"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture
def stored(base: Path, tmp_path: Path) -> tuple[LocalObjectStore, str]:
    """A store with a whole model, and the sha256 of its manifest."""
    made = tmp_path / "package"
    sha256 = whole_model.write_whole_model(
        build_tiny_model(tmp_path / "trained", seed=5), made, served_name="tiny", base_digest=model_digest(base)
    )
    store = LocalObjectStore(tmp_path / "objects")
    for path in made.iterdir():
        store.put_file(f"{PREFIX}/{path.name}", path)
    return store, sha256


def command(tmp_path: Path, base: Path, sha256: str, *, digest: str | None = None) -> list[str]:
    where = ["--prefix", PREFIX, "--manifest-sha256", sha256, "--into", str(tmp_path / "model")]
    return [*where, "--base-dir", str(base), "--base-digest", digest or model_digest(base)]


def test_a_model_lies_complete_beside_its_bases_tokenizer(
    stored: tuple[LocalObjectStore, str], base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FT_OBJECT_STORE", f"file://{tmp_path}/objects")
    monkeypatch.setenv("FT_HOME", str(tmp_path / "home"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "left_over.bin").write_text("of a start that was cut off")
    assert fetch_package.main(command(tmp_path, base, stored[1])) == 0
    names = {p.name for p in (tmp_path / "model").iterdir()}
    assert names == {
        "config.json",
        "model.safetensors",
        "manifest.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    }
    assert package.check_package_files(tmp_path / "model", manifest_sha256=stored[1]) == []


def test_other_bytes_end_with_an_error(
    stored: tuple[LocalObjectStore, str], base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FT_OBJECT_STORE", f"file://{tmp_path}/objects")
    monkeypatch.setenv("FT_HOME", str(tmp_path / "home"))
    assert fetch_package.main(command(tmp_path, base, "0" * 64)) == 1
    assert fetch_package.main(command(tmp_path, base, stored[1], digest="0" * 64)) == 1
    store, sha256 = stored
    store.put_bytes(f"{PREFIX}/model.safetensors", store.get_bytes(f"{PREFIX}/model.safetensors")[:-1] + b"\x01")
    with pytest.raises(IntegrityError, match=r"model\.safetensors is absent or not the file"):
        fetch_package.fetch(store, PREFIX, manifest_sha256=sha256, into=tmp_path / "model")


def test_an_adapter_gets_no_tokenizer(base: Path, tmp_path: Path) -> None:
    made = build_tiny_adapter(tmp_path / "adapter", base, base_name="tiny")
    with pytest.raises(IntegrityError, match="does not get its own server"):
        fetch_package.add_tokenizer(base, base_digest=model_digest(base), into=made)
