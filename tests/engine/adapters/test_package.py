"""What a package may hold: every way in which an adapter cannot be served, made for real and found."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from core.base_models import ENGINE_RANKS
from core.errors import IntegrityError
from engine.adapters import package, servability, tensors
from engine.adapters.package import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PACKAGE_MANIFEST
from engine.training.requested_hyperparameters import HYPERPARAMETER_LIMITS
from tests.support.models.tiny_adapter import Arrays, adapter_arrays, adapter_config, build_tiny_adapter
from tests.support.models.tiny_model import build_tiny_model

Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("base"))


def codes(directory: Path, base: Path, **limits: int) -> list[str]:
    found = package.verify_package(directory, base_shapes=tensors.weight_shapes(base), served_name="tiny", **limits)
    return [r.code for r in found]


def test_every_rank_that_may_be_trained_may_be_served() -> None:
    assert HYPERPARAMETER_LIMITS["rank"].allowed == ENGINE_RANKS


def test_a_sound_adapter_has_no_refusals(base: Path, tmp_path: Path) -> None:
    made = build_tiny_adapter(tmp_path / "a", base, base_name="tiny")
    assert codes(made, base) == []
    read = package.read_package(made)
    assert (read.rank, read.alpha) == (8, 16.0)
    assert read.modules == ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"lora_bias": True}, "unsupported_feature"),
        ({"modules_to_save": ["lm_head"]}, "unsupported_feature"),
        ({"bias": "lora_only"}, "unsupported_feature"),
        ({"init_lora_weights": "pissa_niter_4"}, "unsupported_feature"),
        ({"peft_type": "IA3"}, "not_lora"),
        ({"base_model_name_or_path": "another"}, "base_name_mismatch"),
    ],
)
def test_a_config_that_no_server_can_serve_is_refused(base: Path, tmp_path: Path, change: dict[str, Any], code: str) -> None:
    assert codes(build_tiny_adapter(tmp_path, base, base_name="tiny", config=change), base) == [code]


def drop(key: str) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {k: v for k, v in arrays.items() if k != key}


def put(key: str, value: np.ndarray[Any, Any]) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {**arrays, key: value.astype(np.float32)}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (put(f"{Q}.lora_B.weight", np.full((64, 8), np.nan)), ["not_finite"]),
        (put(f"{Q}.lora_A.weight", np.full((8, 64), np.inf)), ["not_finite"]),
        (put(f"{Q}.lora_A.weight", np.ones((8, 32))), ["shape_mismatch"]),
        (put(f"{Q}.lora_A.weight", np.ones((16, 64))), ["shape_mismatch"]),
        (put("base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight", np.ones((8, 64))), ["unknown_module"]),
        (put("base_model.model.model.embed_tokens.lora_embedding_A", np.ones((8, 64))), ["unknown_module"]),
        (drop(f"{Q}.lora_B.weight"), ["unpaired_tensor"]),
        (lambda _: {}, ["empty_adapter"]),
    ],
)
def test_weights_that_do_not_fit_the_base_are_refused(
    base: Path, tmp_path: Path, change: Callable[[Arrays], Arrays], found: list[str]
) -> None:
    build_tiny_adapter(tmp_path, base, base_name="tiny")
    save_file(change(adapter_arrays(base)), tmp_path / ADAPTER_WEIGHTS)
    assert codes(tmp_path, base) == found


@pytest.mark.parametrize(("rank", "limit", "found"), [(12, 128, 1), (64, 32, 1), (256, 128, 1), (64, 64, 0), (1, 128, 0)])
def test_only_ranks_that_servers_are_started_with_are_served(base: Path, tmp_path: Path, rank: int, limit: int, found: int) -> None:
    made = build_tiny_adapter(tmp_path, base, base_name="tiny", rank=rank)
    assert codes(made, base, max_rank=limit) == ["rank_not_servable"] * found


def test_a_rank_pattern_decides_the_shapes_of_its_modules(base: Path, tmp_path: Path) -> None:
    build_tiny_adapter(tmp_path, base, base_name="tiny", config={"rank_pattern": {"q_proj": 16}, "alpha_pattern": {"q_proj": 8}})
    assert codes(tmp_path, base) == ["shape_mismatch"] * 4
    config = adapter_config("tiny", rank_pattern={"q_proj": 16}, alpha_pattern={"q_proj": 8})
    assert servability.scale_of(config, "model.layers.0.self_attn.q_proj") == 0.5
    assert servability.scale_of(config, "model.layers.0.self_attn.k_proj") == 2.0
    assert servability.scale_of({**config, "use_rslora": True}, "model.layers.0.self_attn.q_proj") == 2.0


def test_a_torn_file_is_unreadable_and_no_crash(base: Path, tmp_path: Path) -> None:
    made = build_tiny_adapter(tmp_path / "a", base, base_name="tiny")
    whole = (made / ADAPTER_WEIGHTS).read_bytes()
    for size in (0, 4, 100, len(whole) - 1):
        (made / ADAPTER_WEIGHTS).write_bytes(whole[:size])
        assert codes(made, base) == ["unreadable"]
    (made / ADAPTER_WEIGHTS).unlink()
    assert codes(made, base) == ["unreadable"]


def test_a_pickle_beside_the_weights_is_refused(base: Path, tmp_path: Path) -> None:
    made = build_tiny_adapter(tmp_path, base, base_name="tiny")
    (made / "training_args.bin").write_bytes(b"\x80")
    assert codes(made, base) == ["unsafe_files"]


@pytest.mark.parametrize(("bits", "finite"), [(0x7F80, False), (0xFF80, False), (0x7FC1, False), (0x7F7F, True), (0x8001, True)])
def test_bfloat16_is_looked_at_bit_by_bit(tmp_path: Path, bits: int, finite: bool) -> None:
    header = json.dumps({"x": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]}}).encode()
    values = np.array([0x3F80, bits, 0], dtype="<u2").tobytes()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + values)
    found = tensors.tensor_header(tmp_path / "x.safetensors")
    assert list(tensors.not_finite(tmp_path / "x.safetensors", found)) == ([] if finite else ["x"])


def test_a_written_package_names_the_served_base_and_its_manifest_holds(base: Path, tmp_path: Path) -> None:
    source = build_tiny_adapter(tmp_path / "trained", base, base_name="/some/local/path")
    sha256 = package.write_package(source, tmp_path / "package", served_name="tiny", base_digest="b" * 64)
    assert codes(tmp_path / "package", base) == []
    assert package.check_package_files(tmp_path / "package", manifest_sha256=sha256) == []
    assert sorted(p.name for p in (tmp_path / "package").iterdir()) == sorted([ADAPTER_CONFIG, ADAPTER_WEIGHTS, PACKAGE_MANIFEST])
    again = package.write_package(source, tmp_path / "again", served_name="tiny", base_digest="b" * 64)
    assert again == sha256


@pytest.mark.parametrize("victim", [ADAPTER_CONFIG, ADAPTER_WEIGHTS, PACKAGE_MANIFEST])
def test_one_flipped_byte_in_any_file_is_found(base: Path, tmp_path: Path, victim: str) -> None:
    source = build_tiny_adapter(tmp_path / "trained", base, base_name="x")
    sha256 = package.write_package(source, tmp_path / "package", served_name="tiny", base_digest="b")
    data = bytearray((tmp_path / "package" / victim).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "package" / victim).write_bytes(data)
    assert [r.code for r in package.check_package_files(tmp_path / "package", manifest_sha256=sha256)] == ["manifest_mismatch"]


def test_a_base_without_safetensors_is_an_error(tmp_path: Path, base: Path) -> None:
    shutil.copy(base / "config.json", tmp_path)
    with pytest.raises(IntegrityError, match="no safetensors weights"):
        tensors.weight_shapes(tmp_path)
