"""What a whole model's package may hold, and what is found in one that is none of its base."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.adapters import package, whole_model
from engine.adapters.whole_model import MODEL_CONFIG
from tests.support.models.tiny_adapter import build_tiny_adapter
from tests.support.models.tiny_model import build_tiny_model

Q = "model.layers.0.self_attn.q_proj.weight"
Arrays = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("trained"), seed=5)


def copied(source: Path, target: Path, change: Callable[[Arrays], Arrays] = lambda arrays: arrays, **config: Any) -> Path:
    target.mkdir()
    save_file(change(load_file(source / "model.safetensors")), target / "model.safetensors", metadata={"format": "pt"})
    (target / MODEL_CONFIG).write_text(json.dumps({**json.loads((source / MODEL_CONFIG).read_text()), **config}))
    return target


def test_a_model_is_told_from_an_adapter_by_its_files(base: Path, tmp_path: Path) -> None:
    assert whole_model.is_whole_model(base)
    assert not whole_model.is_whole_model(build_tiny_adapter(tmp_path / "a", base, base_name="tiny"))
    assert not whole_model.is_whole_model(tmp_path)


def test_its_package_holds_config_and_weights_and_says_which_base_they_came_from(base: Path, trained: Path, tmp_path: Path) -> None:
    sha256 = whole_model.write_whole_model(trained, tmp_path / "made", served_name="tiny", base_digest="d")
    assert sorted(p.name for p in (tmp_path / "made").iterdir()) == ["config.json", "manifest.json", "model.safetensors"]
    assert package.check_package_files(tmp_path / "made", manifest_sha256=sha256) == []
    manifest = json.loads((tmp_path / "made" / "manifest.json").read_text())
    assert (manifest["base_model"], manifest["base_digest"]) == ("tiny", "d")
    assert whole_model.verify_whole_model(tmp_path / "made", base_dir=base) == []


@pytest.mark.parametrize(
    ("change", "config", "found"),
    [
        (lambda a: {**a, Q: np.full_like(a[Q], np.nan)}, {}, ["not_finite"]),
        (lambda a: {**a, Q: a[Q][:32].copy()}, {}, ["shape_mismatch"]),
        (lambda a: {k: v for k, v in a.items() if k != Q}, {}, ["missing_tensor"]),
        (lambda a: {**a, "model.extra.weight": a[Q]}, {}, ["unknown_module"]),
        (lambda a: a, {"num_hidden_layers": 3}, ["shape_mismatch"]),
    ],
)
def test_a_model_that_is_none_of_its_base_is_refused(
    base: Path, trained: Path, tmp_path: Path, change: Callable[[Arrays], Arrays], config: dict[str, Any], found: list[str]
) -> None:
    made = copied(trained, tmp_path / "made", change, **config)
    assert [r.code for r in whole_model.verify_whole_model(made, base_dir=base)] == found


def test_files_that_run_code_and_absent_ones_are_refused(base: Path, trained: Path, tmp_path: Path) -> None:
    made = copied(trained, tmp_path / "made")
    (made / "pytorch_model.bin").write_bytes(b"x")
    assert [r.code for r in whole_model.verify_whole_model(made, base_dir=base)] == ["unsafe_files"]
    shutil.rmtree(made)
    assert [r.code for r in whole_model.verify_whole_model(made, base_dir=base)] == ["unreadable"]
