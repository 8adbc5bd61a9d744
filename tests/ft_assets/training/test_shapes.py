"""Shapes of models: counted parameters are the published ones."""

import json
from pathlib import Path

import pytest

from ft_assets.base_models import count_parameters
from ft_assets.training import model_shapes
from ft_assets.training.model_shapes import ModelShape

DEMO = Path(__file__).parents[3] / "examples" / "demo" / "base_model"

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


@pytest.mark.parametrize("name", model_shapes.NAMED)
def test_a_named_shape_counts_the_published_number_of_parameters(name: str) -> None:
    assert model_shapes.NAMED[name].num_parameters == PUBLISHED[name]


def test_the_demo_models_config_counts_the_parameters_of_its_weights() -> None:
    assert model_shapes.of("demo-llama-3m", directory=DEMO).num_parameters == count_parameters(DEMO)


def test_a_lora_adapter_of_rank_16_on_llama_8b_has_the_41_943_040_parameters_that_peft_prints() -> None:
    assert model_shapes.NAMED["llama-3.1-8b"].lora_parameters(16) == 41_943_040


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
    assert model_shapes.named(name) == (None if found is None else model_shapes.NAMED[found])


def test_an_unknown_model_gets_the_shape_of_the_next_larger_one_and_says_so() -> None:
    shape = model_shapes.of("somebody/else-7b", num_parameters=6_700_000_000)
    assert shape.assumed and shape.num_parameters == PUBLISHED["mistral-7b"]


def test_a_config_gives_biases_norms_and_head_size_of_its_family() -> None:
    config = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    qwen2 = ModelShape.from_config(config | {"model_type": "qwen2"})
    qwen3 = ModelShape.from_config(config | {"model_type": "qwen3", "head_dim": 32})
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.head_dim, qwen2.num_kv_heads) == (True, False, 16, 4)
    assert (qwen3.qk_norm, qwen3.q_size) == (True, 128)


def test_a_mixture_of_experts_and_a_config_without_sizes_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_local_experts is 8"):
        ModelShape.from_config({"model_type": "mixtral", "num_local_experts": 8})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 768}))
    with pytest.raises(ValueError, match="gpt2 has no 'num_attention_heads'"):
        model_shapes.of("gpt2", directory=tmp_path)
