"""Each way in which an adapter trains well and cannot be served, and that nothing which may be in the files stops the answer."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from core.errors import IntegrityError, InvalidRequest
from engine.adapters import package, servability, tensors
from engine.adapters.package import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from engine.training import requested_hyperparameters
from tests.support.models.tiny_adapter import Arrays, adapter_arrays, adapter_config, build_tiny_adapter
from tests.support.models.tiny_model import build_tiny_model

LAYER = "base_model.model.model.layers.0"
Q = f"{LAYER}.self_attn.q_proj"
Shapes = dict[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def shapes(base: Path) -> Shapes:
    return tensors.weight_shapes(base)


def refusals(directory: Path, shapes: Shapes) -> list[str]:
    return [f"{r.code}: {r.detail}" for r in package.verify_package(directory, base_shapes=shapes, served_name="tiny")]


def codes(directory: Path, shapes: Shapes) -> set[str]:
    return {text.split(":")[0] for text in refusals(directory, shapes)}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"r": None}, "malformed_config"),
        ({"r": True}, "malformed_config"),
        ({"r": 8.0}, "malformed_config"),
        ({"r": "8"}, "malformed_config"),
        ({"r": 0}, "malformed_config"),
        ({"r": [8]}, "malformed_config"),
        ({"r": 4}, "rank_not_servable"),
        ({"lora_alpha": None}, "malformed_config"),
        ({"lora_alpha": math.nan}, "malformed_config"),
        ({"lora_alpha": math.inf}, "malformed_config"),
        ({"lora_alpha": 1e30}, "malformed_config"),
        ({"lora_alpha": 0}, "malformed_config"),
        ({"lora_alpha": -16}, "malformed_config"),
        ({"alpha_pattern": {"q_proj": math.nan}}, "malformed_config"),
        ({"alpha_pattern": ["q_proj"]}, "malformed_config"),
        ({"rank_pattern": {"q_proj": "8"}}, "malformed_config"),
        ({"rank_pattern": {"(a+)+$": 8}}, "malformed_config"),
        ({"rank_pattern": {"(": 8}}, "malformed_config"),
        ({"rank_pattern": {"q_proj": 256}}, "rank_not_servable"),
        ({"target_modules": None}, "malformed_config"),
        ({"target_modules": []}, "malformed_config"),
        ({"target_modules": {"q_proj": 1}}, "malformed_config"),
        ({"target_modules": ["q_proj"]}, "module_mismatch"),
        ({"target_modules": [*requested_hyperparameters.MODULES, "lm_head"]}, "module_mismatch"),
        ({"peft_type": None}, "not_lora"),
        ({"task_type": "SEQ_CLS"}, "unsupported_feature"),
        ({"bias": "all"}, "unsupported_feature"),
        ({"use_dora": True}, "needs_merge"),
        ({"use_qalora": True}, "unsupported_feature"),
        ({"use_bdlora": {"nblocks": 2}}, "unsupported_feature"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "unsupported_feature"),
        ({"alora_invocation_tokens": [1]}, "unsupported_feature"),
        ({"trainable_token_indices": [1]}, "unsupported_feature"),
        ({"target_parameters": ["experts.down_proj"]}, "unsupported_feature"),
        ({"modules_to_save": ["embed_tokens", "lm_head"]}, "unsupported_feature"),
        ({"init_lora_weights": "pissa"}, "unsupported_feature"),
        ({"init_lora_weights": "PiSSA_niter_16"}, "unsupported_feature"),
        ({"init_lora_weights": "olora"}, "unsupported_feature"),
        ({"init_lora_weights": "corda"}, "unsupported_feature"),
        ({"init_lora_weights": "loftq"}, "unsupported_feature"),
        ({"init_lora_weights": 3}, "unsupported_feature"),
        ({"a_switch_of_next_year": True}, "unsupported_feature"),
        ({"base_model_name_or_path": None}, "base_name_mismatch"),
    ],
)
def test_each_config_that_cannot_be_served_is_refused(
    shapes: Shapes, base: Path, tmp_path: Path, change: dict[str, Any], code: str
) -> None:
    found = codes(build_tiny_adapter(tmp_path, base, base_name="tiny", config=change), shapes)
    assert code in found
    assert found <= {code, "shape_mismatch"}  # a wrong rank also fits no tensor


@pytest.mark.parametrize(
    "change",
    [
        {"init_lora_weights": "gaussian"}, {"init_lora_weights": False}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 4}},
        {"rank_pattern": {"layers.0.self_attn.q_proj": 8}}, {"a_switch_of_next_year": None}, {"target_modules": "all-linear"},
        {"modules_to_save": []}, {"loftq_config": {}}, {"peft_version": "0.99"},
    ],
)  # fmt: skip
def test_what_says_nothing_of_the_weights_is_fine(shapes: Shapes, base: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    assert refusals(build_tiny_adapter(tmp_path, base, base_name="tiny", config=change), shapes) == []


def test_what_peft_writes_of_a_plain_adapter_is_fine(shapes: Shapes, base: Path, tmp_path: Path) -> None:
    """Every field of the library's config is known: either to be harmless, or to be refused once it is set."""
    from peft import LoraConfig

    build_tiny_adapter(tmp_path, base, base_name="tiny")
    plain = LoraConfig(
        r=8, lora_alpha=16, target_modules=list(requested_hyperparameters.MODULES), task_type="CAUSAL_LM", base_model_name_or_path="tiny"
    )
    fields = json.dumps(plain.to_dict(), default=lambda v: sorted(v) if isinstance(v, set) else str(v))
    (tmp_path / ADAPTER_CONFIG).write_text(fields)
    assert refusals(tmp_path, shapes) == []
    assert set(plain.to_dict()) <= servability.HARMLESS | servability.UNSUPPORTED.keys()


def test_a_dora_adapter_has_a_length_for_each_row_of_each_module(shapes: Shapes, base: Path, tmp_path: Path) -> None:
    made = build_tiny_adapter(tmp_path, base, base_name="tiny", config={"use_dora": True})
    found = package.verify_package(made, base_shapes=shapes, served_name="tiny")
    assert [(r.code, r.is_fault) for r in found] == [("needs_merge", False)]
    arrays = load_file(made / ADAPTER_WEIGHTS)
    one = next(name for name in arrays if name.endswith("lora_magnitude_vector"))
    save_file({**arrays, one: arrays[one][:-1]}, made / ADAPTER_WEIGHTS)
    assert codes(made, shapes) == {"needs_merge", "shape_mismatch"}
    save_file({name: array for name, array in arrays.items() if name != one}, made / ADAPTER_WEIGHTS)
    assert codes(made, shapes) == {"needs_merge", "unpaired_tensor"}


def ones(*shape: int) -> np.ndarray[Any, Any]:
    return np.ones(shape, dtype=np.float32)


HEAD, EMBEDDING = "base_model.model.lm_head", "base_model.model.model.embed_tokens"


@pytest.mark.parametrize(
    ("extra", "code", "says"),
    [
        ({f"{HEAD}.lora_A.weight": ones(8, 64), f"{HEAD}.lora_B.weight": ones(260, 8)}, "unknown_module", "is a head"),
        ({f"{HEAD}.weight": ones(300, 64)}, "unknown_module", "vocabulary was resized"),
        ({f"{EMBEDDING}.lora_embedding_A": ones(8, 260)}, "unknown_module", "trains the embedding"),
        ({f"{EMBEDDING}.weight": ones(300, 64)}, "unknown_module", "vocabulary was resized"),
        ({f"{EMBEDDING}.lora_A.weight": ones(8, 64), f"{EMBEDDING}.lora_B.weight": ones(260, 8)}, "unknown_module", "is an embedding"),
        ({f"{Q}.lora_magnitude_vector": ones(64)}, "unknown_module", "DoRA"),
        ({f"{Q}.lora_B.bias": ones(64)}, "unknown_module", "a trained bias"),
        ({f"{LAYER}.self_attn.foo_proj.lora_A.weight": ones(8, 64)}, "unknown_module", "no linear module"),
        ({f"{LAYER}.input_layernorm.lora_A.weight": ones(8, 64)}, "unknown_module", "no linear module"),
        ({"base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": ones(8, 64)}, "unknown_module", "no linear module"),
        ({f"{Q}.lora_A.weight": ones(8, 128)}, "shape_mismatch", "[8, 128]"),
        ({f"{Q}.lora_A.weight": ones(16, 64), f"{Q}.lora_B.weight": ones(64, 16)}, "shape_mismatch", "need [8, 64]"),
        ({f"{Q}.lora_A.weight": ones(8, 64).astype(np.float64)}, "dtype_not_servable", "of type F64"),
        ({f"{Q}.lora_A.weight": ones(8, 64).astype(np.int8)}, "dtype_not_servable", "of type I8"),
        ({f"{Q}.lora_A.weight": ones(8, 64) * 1e6}, "not_finite", "infinity in half precision"),
        ({f"{Q}.lora_A.weight": ones(8, 64) * -np.inf}, "not_finite", "NaN or infinity"),
    ],
)
def test_each_tensor_that_cannot_be_served_is_refused(
    shapes: Shapes, base: Path, tmp_path: Path, extra: Arrays, code: str, says: str
) -> None:
    build_tiny_adapter(tmp_path, base, base_name="tiny")
    save_file(adapter_arrays(base) | extra, tmp_path / ADAPTER_WEIGHTS)
    found = refusals(tmp_path, shapes)
    assert any(text.startswith(code) and says in text for text in found), found


def test_half_precision_and_the_largest_number_that_it_holds_are_fine(shapes: Shapes, base: Path, tmp_path: Path) -> None:
    build_tiny_adapter(tmp_path, base, base_name="tiny")
    save_file({k: np.full(v.shape, 65504, np.float16) for k, v in adapter_arrays(base).items()}, tmp_path / ADAPTER_WEIGHTS)
    assert refusals(tmp_path, shapes) == []


def test_an_adapter_that_lost_a_layer_is_refused(shapes: Shapes, base: Path, tmp_path: Path) -> None:
    build_tiny_adapter(tmp_path, base, base_name="tiny")
    save_file({k: v for k, v in adapter_arrays(base).items() if "layers.1." not in k}, tmp_path / ADAPTER_WEIGHTS)
    assert refusals(tmp_path, shapes) == [
        "module_mismatch: target_modules names 7 modules without tensors, the first is model.layers.1.mlp.down_proj"
    ]
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(adapter_config("tiny", layers_to_transform=[0])))
    assert refusals(tmp_path, shapes) == []


def test_only_the_plain_files_of_an_adapter_are_in_its_directory(shapes: Shapes, base: Path, tmp_path: Path) -> None:
    made = build_tiny_adapter(tmp_path / "a", base, base_name="tiny")
    secret = tmp_path / "secret"
    secret.write_text("x")
    for name, make in (("notes.txt", Path.touch), ("sub", Path.mkdir), ("link", lambda p: p.symlink_to(secret))):
        make(made / name)  # type: ignore[operator]
        assert codes(made, shapes) == {"odd_files"}, name
        (made / name).rmdir() if name == "sub" else (made / name).unlink()
    (made / ADAPTER_WEIGHTS).rename(tmp_path / ADAPTER_WEIGHTS)
    (made / ADAPTER_WEIGHTS).symlink_to(tmp_path / ADAPTER_WEIGHTS)
    assert codes(made, shapes) == {"unreadable"}


def test_every_library_option_that_cannot_be_served_is_refused_before_training() -> None:
    for name in ("modules_to_save", "bias", "lora_bias", "trainable_token_indices", "added_tokens"):
        with pytest.raises(InvalidRequest, match="is not offered"):
            requested_hyperparameters.checked_hyperparameters({name: True})
    for modules in (["lm_head"], ["q_proj", "embed_tokens"], ["model.layers.0.mlp.gate_proj"]):
        with pytest.raises(InvalidRequest, match="the inference servers adapt only these layers"):
            requested_hyperparameters.checked_hyperparameters({"target_modules": modules})
    for rank in (4, 12, 24, 1024):
        with pytest.raises(InvalidRequest, match="the inference servers load no other ranks"):
            requested_hyperparameters.checked_hyperparameters({"rank": rank})
    assert not set(requested_hyperparameters.MODULES) & servability.OUTSIDE_LAYERS


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 600) | st.floats() | st.text(max_size=8) | st.sampled_from(["q_proj", "LORA", "tiny"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.just("q_proj"), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(sorted(servability.HARMLESS | servability.UNSUPPORTED.keys()))


@settings(max_examples=150, deadline=None)
@given(changes=st.dictionaries(FIELDS, JSON, min_size=1, max_size=3))
def test_no_config_stops_the_answer(base: Path, shapes: Shapes, tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]) -> None:
    """And where none of the changes is refused, rank and scale of every module are numbers that a server can compute with."""
    config = adapter_config("tiny", **changes)
    found = servability.of_config(config, served_name="tiny", max_rank=128)
    weights = {name: tensors.TensorInfo(dtype="F32", shape=v.shape, start=0, end=0) for name, v in adapter_arrays(base).items()}
    if not any(r.code == "malformed_config" for r in found):
        servability.of_tensors(config, weights, shapes)
        assert all(math.isfinite(servability.scale_of(config, name)) for name in shapes)


@pytest.mark.parametrize("text", ["[]", "null", '"x"', "7", "{", "", "\x00", "[" * 100_000, '{"r": 8}'])
def test_no_config_file_stops_the_answer(shapes: Shapes, base: Path, tmp_path: Path, text: str) -> None:
    made = build_tiny_adapter(tmp_path, base, base_name="tiny")
    (made / ADAPTER_CONFIG).write_text(text)
    assert codes(made, shapes) & {"unreadable", "malformed_config"}


def test_bytes_changed_at_random_are_found_or_harmless(shapes: Shapes, base: Path, tmp_path: Path) -> None:
    """Whatever passes here, the library that the servers read files with can open too."""
    made, rng = build_tiny_adapter(tmp_path, base, base_name="tiny"), random.Random(5)
    whole = (made / ADAPTER_WEIGHTS).read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    refused = 0
    for _ in range(300):
        torn = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            torn[rng.randrange(header)] = rng.choice([0, 34, 44, 48, 57, 91, 93, 123, 125, 255, rng.randrange(256)])
        if rng.random() < 0.2:
            torn = torn[: rng.randrange(len(torn))]
        (made / ADAPTER_WEIGHTS).write_bytes(torn)
        if refusals(made, shapes):
            refused += 1
        else:
            with safe_open(made / ADAPTER_WEIGHTS, framework="np") as opened:
                assert len(list(opened.keys())) == 28
    assert refused > 200


def test_holes_overlaps_and_tails_are_refused_as_the_format_says(tmp_path: Path) -> None:
    def write(entries: dict[str, Any], data: bytes) -> Path:
        head = json.dumps(entries).encode()
        (tmp_path / ADAPTER_WEIGHTS).write_bytes(len(head).to_bytes(8, "little") + head + data)
        return tmp_path / ADAPTER_WEIGHTS

    def entry(start: int, end: int, *shape: int) -> dict[str, Any]:
        return {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}

    whole = write({"a": entry(0, 8, 2), "b": entry(8, 16, 2)}, bytes(16))
    assert set(tensors.tensor_header(whole)) == {"a", "b"}
    for entries, size in (
        ({"a": entry(0, 8, 2), "b": entry(12, 20, 2)}, 20),
        ({"a": entry(0, 8, 2), "b": entry(4, 12, 2)}, 12),
        ({"a": entry(0, 8, 2)}, 16),
        ({"a": entry(0, 8, 3)}, 8),
        ({"a": entry(0, 8, -2)}, 8),
        ({"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}, 8),
    ):
        torn = write(entries, bytes(size))
        with pytest.raises(IntegrityError, match=r"tensor|broken"):
            tensors.tensor_header(torn)
        with pytest.raises(SafetensorError), safe_open(torn, framework="np"):
            pass
