"""Shapes of models: counted parameters are the published ones."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.base_models import count_parameters
from engine.training import model_shapes
from engine.training.model_shapes import context_split

DEMO = Path(__file__).parents[4] / "examples" / "demo" / "base_model"

PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.3-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b": 7_248_023_552,
    "mistral-nemo": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
}
"""Parameters of the safetensors files of each hub repository, tied embeddings counted once."""


@pytest.mark.parametrize("name", model_shapes.WELL_KNOWN_SHAPES)
def test_a_named_shape_counts_the_published_number_of_parameters(name: str) -> None:
    assert model_shapes.WELL_KNOWN_SHAPES[name].num_parameters == PUBLISHED[name]


def test_the_demo_models_config_counts_the_parameters_of_its_weights() -> None:
    assert model_shapes.shape_of("demo-llama-3m", directory=DEMO).num_parameters == count_parameters(DEMO)


def test_a_lora_adapter_of_rank_16_on_llama_8b_has_the_41_943_040_parameters_that_peft_prints() -> None:
    assert model_shapes.WELL_KNOWN_SHAPES["llama-3.1-8b"].lora_parameters(16) == 41_943_040


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Meta-Llama-3.1-70B", "llama-3.1-70b"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "qwen2.5-0.5b"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "mistral-nemo"),
        ("somebody/else-7b", None),
    ],
)
def test_a_hub_name_finds_its_shape(name: str, found: str | None) -> None:
    assert model_shapes.well_known_shape(name) == (None if found is None else model_shapes.WELL_KNOWN_SHAPES[found])


def test_an_unknown_model_gets_the_shape_of_the_next_larger_one_and_says_so() -> None:
    shape = model_shapes.shape_of("somebody/else-7b", num_parameters=6_700_000_000)
    assert shape.assumed and shape.num_parameters == PUBLISHED["mistral-7b"]


def test_a_config_gives_biases_norms_and_head_size_of_its_family() -> None:
    config = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    qwen2 = model_shapes.from_config(config | {"model_type": "qwen2"})
    qwen3 = model_shapes.from_config(config | {"model_type": "qwen3", "head_dim": 32})
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.head_dim, qwen2.num_kv_heads) == (True, False, 16, 4)
    assert (qwen3.qk_norm, qwen3.q_size) == (True, 128)


@pytest.mark.parametrize(
    ("rope", "positions", "varying"),
    [
        ({}, 32_768, ""),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}}, 131_072, ""),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 8192}}, 32_768, ""),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}}, 32_768, ""),
        ({"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 4096}}, 32_768, "longrope"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}, "sliding_attention": {}}}, 32_768, "dynamic"),
    ],
)
def test_positions_are_those_that_the_config_has_or_scales(rope: dict[str, Any], positions: int, varying: str) -> None:
    config = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    shape = model_shapes.from_config({"model_type": "llama", "max_position_embeddings": 32_768, **config, **rope})
    assert (shape.context_length, shape.varying_rope) == (positions, varying)


@pytest.mark.parametrize(
    ("changes", "size", "given", "why"),
    [
        ({}, 8, {}, None),
        ({}, 8, {"kernel": "sdpa", "on_cpu": True}, None),
        ({}, 2, {"kernel": "sdpa"}, "they need flash_attention_2, and its attention is computed by sdpa here"),
        ({"num_kv_heads": 2}, 8, {}, None),
        ({"num_heads": 28, "num_kv_heads": 4}, 8, {}, "its 28 attention heads do not divide by 8"),
        ({"num_kv_heads": 6, "num_heads": 36}, 4, {}, "its 6 heads of keys and 4 ranks do not divide by each other"),
        ({"soft_caps": True}, 2, {"kernel": "flex_attention"}, "its attention has soft caps"),
        ({"num_recurrent_layers": 4}, 2, {}, "it has recurrent layers, which read a window from its start"),
        ({"varying_rope": "longrope"}, 2, {}, "its rotary positions (longrope) depend on the longest example of a batch"),
    ],
)
def test_windows_are_split_where_that_is_exact(changes: dict[str, Any], size: int, given: dict[str, Any], why: str | None) -> None:
    shape = replace(model_shapes.WELL_KNOWN_SHAPES["llama-3.1-8b"], **changes)
    where: dict[str, Any] = {"kernel": "flash_attention_2", "on_cpu": False}
    assert context_split.context_objection(shape, size, **where | given) == why


def test_unknown_layers_compressed_keys_and_a_config_without_sizes_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kv_lora_rank 512"):
        model_shapes.from_config({"model_type": "deepseek_v3", "kv_lora_rank": 512})
    with pytest.raises(ValueError, match="granitemoehybrid has mamba layers"):
        model_shapes.from_config({"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 768}))
    with pytest.raises(ValueError, match="gpt2 has no 'num_attention_heads'"):
        model_shapes.shape_of("gpt2", directory=tmp_path)


QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151_936, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
    "max_position_embeddings": 40_960,
}  # fmt: skip
"""``config.json`` of Qwen/Qwen3-30B-A3B."""


def test_a_mixture_counts_all_experts_in_its_size_and_the_chosen_ones_in_its_work() -> None:
    shape = model_shapes.from_config(QWEN3_MOE)
    assert shape.num_parameters == 30_532_122_624  # of the repository's safetensors
    assert round((shape.active_parameters + shape.embedding_parameters) / 1e9, 1) == 3.3  # "3.3B activated", its card
    assert shape.mlp_width == 8 * 768


def test_an_adapter_on_a_mixture_has_matrices_for_attention_alone() -> None:
    shape = model_shapes.from_config(QWEN3_MOE)
    assert shape.lora_parameters(16) == 16 * 48 * ((2048 + 4096) * 2 + (2048 + 512) * 2)


def test_parameters_that_a_nested_config_leaves_unexplained_are_frozen_ones_of_other_parts(tmp_path: Path) -> None:
    text = {"model_type": "mistral", **{k: v for k, v in QWEN3_MOE.items() if "expert" not in k and k != "model_type"}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral3", "text_config": text, "vision_config": {}}))
    alone = model_shapes.from_config(text).num_parameters
    shape = model_shapes.shape_of("any", directory=tmp_path, num_parameters=alone + 1000)
    assert (shape.decoder_parameters, shape.other_parameters, shape.num_parameters) == (alone, 1000, alone + 1000)


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"model_type": "llama"}, None),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "layer_types": ["sliding_attention"]}}, None),
        ({"model_type": "llama4", "text_config": {"model_type": "llama4_text", "attention_chunk_size": 8192}}, 8192),
        ({"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", "layer_types": ["linear_attention"]}}, 0),
        ({"model_type": "qwen3_next"}, 0),
    ],
)
def test_a_window_is_shared_only_where_no_state_passes_and_no_chunk_begins_in_it(config: dict[str, object], longest: int | None) -> None:
    assert model_shapes.max_packed_len(config) == longest
