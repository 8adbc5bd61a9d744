"""Keys and manifests of reference log-probabilities: what decides them, and that damage is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from core.errors import IntegrityError
from engine.training.reference_logps import ReferenceManifest, partial_name, reference_key, usable_files, verify, write_logps
from engine.training.spec import Quantization
from tests.support.models.reference_rows import load_logps

KEY = reference_key("pk_1", "d", "fp32", "sdpa")


def written(directory: Path) -> ReferenceManifest:
    directory.mkdir(exist_ok=True)
    files = tuple(
        write_logps(directory, name, {"row": [1 + 2 * n, 2 + 2 * n], "chosen_logp": [-1.5, -2.0], "rejected_logp": [-3.0, -0.5]})
        for n, name in enumerate(("shard-00000.parquet", "val-00000.parquet"))
    )
    manifest = ReferenceManifest(key=KEY, pack_fingerprint="pk_1", base_digest="d", precision="fp32", attention="sdpa", files=files)
    manifest.write(directory)
    return manifest


def test_the_key_depends_on_pack_model_and_how_it_is_run() -> None:
    keys = {
        KEY,
        reference_key("pk_2", "d", "fp32", "sdpa"),
        reference_key("pk_1", "e", "fp32", "sdpa"),
        reference_key("pk_1", "d", "bf16", "sdpa"),
        reference_key("pk_1", "d", "fp32", "eager"),
        reference_key("pk_1", "d", "fp32", "sdpa", quantization=Quantization()),
        reference_key("pk_1", "d", "fp32", "sdpa", quantization=Quantization(double=False)),
        reference_key("pk_1", "d", "fp32", "sdpa", quantization=Quantization(kind="fp4")),
        reference_key("pk_1", "d", "fp32", "sdpa", adapter="a"),
    }
    assert len(keys) == 9
    assert reference_key("pk_1", "d", "fp32", "sdpa") == KEY and KEY.startswith("rf_")


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    manifest = written(tmp_path)
    assert verify(tmp_path) == manifest == ReferenceManifest.read(tmp_path)
    table = load_logps(tmp_path, manifest, ["val-00000.parquet", "shard-00000.parquet"])
    assert table["row"].to_pylist() == [3, 4, 1, 2]
    assert table["rejected_logp"].to_pylist() == [-3.0, -0.5, -3.0, -0.5]


@pytest.mark.parametrize("name", ["ref-shard-00000.parquet", "ref-val-00000.parquet"])
def test_a_truncated_file_is_damage_and_only_that_file_is_unusable(tmp_path: Path, name: str) -> None:
    manifest = written(tmp_path)
    file = tmp_path / name
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(IntegrityError, match=name):
        verify(tmp_path)
    assert usable_files(tmp_path, KEY) == [f for f in manifest.files if f.name != name]
    file.unlink()
    with pytest.raises(IntegrityError, match="absent"):
        verify(tmp_path)


def test_files_of_another_key_are_not_used(tmp_path: Path) -> None:
    written(tmp_path)
    assert usable_files(tmp_path, "rf_other") == []


def test_an_unfinished_computation_is_not_whole_but_its_files_are_usable(tmp_path: Path) -> None:
    manifest = written(tmp_path)
    (tmp_path / "manifest.json").unlink()
    replace(manifest, files=manifest.files[:1]).write(tmp_path, name=partial_name(1))
    with pytest.raises(IntegrityError, match="no complete reference"):
        verify(tmp_path)
    assert usable_files(tmp_path, KEY) == [manifest.files[0]]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": [{}]}', '{"files": 3}'])
def test_a_torn_manifest_is_damage(tmp_path: Path, text: str) -> None:
    written(tmp_path)
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(IntegrityError):
        verify(tmp_path)
    assert usable_files(tmp_path, KEY) == []


def test_judged_answers_have_columns_of_their_own(tmp_path: Path) -> None:
    file = write_logps(tmp_path, "shard-00000.parquet", {"row": [4, 5], "logp": [-1.0, -2.0], "kl_logp": [-3.0, -4.0]}, kind="judged")
    ReferenceManifest(
        key=KEY, pack_fingerprint="pk_1", base_digest="d", precision="fp32", attention="sdpa", kind="judged", files=(file,)
    ).write(tmp_path)
    manifest = verify(tmp_path)
    table = load_logps(tmp_path, manifest, ["shard-00000.parquet"])
    assert table.to_pydict() == {"row": [4, 5], "logp": [-1.0, -2.0], "kl_logp": [-3.0, -4.0]}
