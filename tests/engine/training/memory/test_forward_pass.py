"""GPUs that hold a whole model, by the formula and by the device map that transformers makes of a real architecture without weights."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from engine.training.memory import GPUS, forward_pass
from engine.training.memory.gpus import GIB
from engine.training.model_shapes import WELL_KNOWN_SHAPES, ModelShape

FITS_ONE = {  # weights in bf16, and 5 GiB for the rest
    (model, gpu.name)
    for model, shape in WELL_KNOWN_SHAPES.items()
    for gpu in GPUS.values()
    if 2 * shape.num_parameters + 5 * GIB < gpu.memory_bytes
}


def num_gpus(model: str, gpu: str, *, rank: int = 16) -> int | None:
    return forward_pass.forward_pass_gpus(WELL_KNOWN_SHAPES[model], GPUS[gpu].memory_bytes, rank=rank)


def device_map(shape: ModelShape, gpus: int, memory_bytes: int) -> dict[str, Any]:
    """The device map that `from_pretrained` uses for a Llama of this shape."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.integrations.accelerate import _get_device_map

    config = LlamaConfig(
        hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=shape.num_layers, vocab_size=shape.vocab,
        num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied_embeddings,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made: dict[str, Any] = _get_device_map(model, "balanced", dict.fromkeys(range(gpus), memory_bytes), None)
    return made


def test_the_named_models_take_the_fewest_gpus_that_hold_them() -> None:
    assert [num_gpus("llama-3.1-70b", gpu) for gpu in ("h100-80gb", "h200-141gb", "a100-40gb")] == [2, 1, 5]
    assert num_gpus("llama-3.1-70b", "h100-80gb", rank=512) == 3, "two adapters of 25 GiB"
    for model in WELL_KNOWN_SHAPES:
        for gpu in GPUS.values():
            found = num_gpus(model, gpu.name)
            if gpu.is_cpu or not found:
                continue
            per_gpu = [forward_pass.per_gpu_bytes(WELL_KNOWN_SHAPES[model], n, rank=16) for n in range(1, found + 1)]
            assert per_gpu[-1] <= gpu.memory_bytes and all(bytes_ > gpu.memory_bytes for bytes_ in per_gpu[:-1])


def test_a_model_that_one_gpu_holds_takes_one() -> None:
    assert len(FITS_ONE) > 100
    assert {num_gpus(model, gpu, rank=8) for model, gpu in FITS_ONE} == {1}


@pytest.mark.parametrize(
    ("model", "gpu"), [("llama-3.1-70b", "h100-80gb"), ("llama-3.1-70b", "a100-40gb"), ("mistral-small-24b", "l4-24gb")]
)
def test_transformers_puts_every_layer_onto_a_gpu_and_none_holds_more_than_the_formula_says(model: str, gpu: str) -> None:
    shape, memory_bytes = WELL_KNOWN_SHAPES[model], GPUS[gpu].memory_bytes
    gpus = num_gpus(model, gpu)
    assert gpus is not None and gpus > 1
    made = device_map(shape, gpus, memory_bytes)
    assert set(made.values()) == set(range(gpus)), "nothing on the CPU or a disk, and no GPU idle"
    held: Counter[int] = Counter()
    for name, device in made.items():
        in_layer, table = ".layers." in name, name.endswith(("embed_tokens", "lm_head"))
        held[device] += 2 * (shape.layer_parameters if in_layer else shape.vocab * shape.hidden if table else 0)
    assert sum(held.values()) == pytest.approx(2 * shape.num_parameters, rel=1e-4)
    most = forward_pass.weight_bytes(shape, gpus)
    assert 0.9 * most < max(held.values()) <= most
