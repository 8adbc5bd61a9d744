"""Which kernel computes attention, by GPU and model; every one that is passed over has its reason."""

from __future__ import annotations

from typing import Any

import pytest

from engine.training import model_shapes
from engine.training.memory import GPUS
from engine.training.model_shapes.attention_kernels import Device, choose

BASE: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14_336,
    "vocab_size": 128_256, "max_position_embeddings": 8192,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **BASE},
    "mistral, sliding windows": {"model_type": "mistral", "sliding_window": 4096, **BASE},
    "gemma 2, caps and heads of 256": {"model_type": "gemma2", "head_dim": 256, "attn_logit_softcapping": 50.0, **BASE},
    "gemma 3, heads of 256": {"model_type": "gemma3_text", "head_dim": 256, **BASE},
    "gpt-oss, sinks": {"model_type": "gpt_oss", "head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2, **BASE},
    "llama 4, chunks": {"model_type": "llama4_text", "attention_chunk_size": 8192, **BASE},
    "heads of 200": {"model_type": "llama", "head_dim": 200, **BASE},
    "heads of 320": {"model_type": "llama", "head_dim": 320, **BASE},
    "heads of 100": {"model_type": "llama", "head_dim": 100, **BASE},
    "dropout of attention": {"model_type": "llama", "attention_dropout": 0.1, **BASE},
}
FLASH, FLEX = "flash_attention_2", "flex_attention"
AMPERE = ("h100-80gb", "a100-80gb", "l4-24gb")
OLD = ("t4-16gb", "cpu")


@pytest.mark.parametrize(
    ("model", "gpus", "kernel", "because"),
    [
        ("llama", AMPERE, FLASH, "first choice"),
        ("llama", ("t4-16gb",), "sdpa", "flash_attention_2 has no kernels for compute capability 7.5"),
        ("llama", ("cpu",), "sdpa", "flash_attention_2 has no kernels for a CPU"),
        ("mistral, sliding windows", AMPERE, FLASH, "first choice"),
        ("mistral, sliding windows", OLD, "sdpa", "has no kernels"),
        ("gemma 2, caps and heads of 256", ("h100-80gb", "a100-80gb"), FLEX, "flash_attention_2 does not compute soft caps"),
        ("gemma 2, caps and heads of 256", ("l4-24gb",), "eager", "flex_attention takes heads of at most 128 on compute capability 8.9"),
        ("gemma 2, caps and heads of 256", OLD, "eager", "sdpa does not compute soft caps"),
        ("gemma 3, heads of 256", AMPERE, FLASH, "first choice"),
        ("gemma 3, heads of 256", OLD, "sdpa", "has no kernels"),
        ("gpt-oss, sinks", AMPERE, FLEX, "flash_attention_2 does not compute sinks"),
        ("gpt-oss, sinks", OLD, "eager", "sdpa does not compute sinks"),
        ("llama 4, chunks", AMPERE, "sdpa", "does not keep examples apart in chunked layers"),
        ("heads of 200", ("h100-80gb", "a100-80gb"), FLASH, "first choice"),
        ("heads of 200", ("l4-24gb",), "sdpa", "no backward pass for heads of 200 on compute capability 8.9"),
        ("heads of 320", AMPERE, "sdpa", "takes heads of at most 256 in multiples of 8, not 320"),
        ("heads of 100", AMPERE, FLEX, "multiples of 8, not 100"),
        ("dropout of attention", AMPERE, "sdpa", "does not drop out attention weights"),
    ],
)
def test_auto_takes_the_fastest_kernel_that_computes_the_model(model: str, gpus: tuple[str, ...], kernel: str, because: str) -> None:
    needs = model_shapes.from_config(CONFIGS[model]).attention_needs
    for gpu in gpus:
        found = choose("auto", needs, GPUS[gpu].device, precision="bf16", packed=True)
        assert found.kernel == kernel, gpu
        assert because in found.reason, gpu


@pytest.mark.parametrize(
    ("wanted", "changes", "kernel", "because"),
    [
        ("auto", {"precision": "fp32"}, "sdpa", "first choice"),
        (FLASH, {"precision": "fp32"}, FLEX, "supports only bf16 and fp16, not fp32"),
        ("auto", {"packed": False}, "sdpa", "first choice"),
        (FLASH, {"packed": False}, FLASH, "first choice"),
        (FLEX, {"packed": False}, "sdpa", "flex_attention requires packed windows"),
        ("sdpa", {}, "sdpa", "first choice"),
        ("eager", {}, "eager", "first choice"),
        (FLEX, {"device": Device(capability=(9, 0), missing="Triton")}, "sdpa", "Triton is not installed"),
        ("auto", {"device": Device(capability=(9, 0), missing="Triton")}, FLASH, "first choice"),
        ("auto", {"device": Device(capability=(12, 0))}, FLASH, "first choice"),
    ],
)
def test_a_request_is_kept_where_it_works(wanted: str, changes: dict[str, Any], kernel: str, because: str) -> None:
    needs = model_shapes.WELL_KNOWN_SHAPES["llama-3.1-8b"].attention_needs
    given: dict[str, Any] = {"device": Device(capability=(9, 0)), "precision": "bf16", "packed": True}
    found = choose(wanted, needs, **given | changes)
    assert found.kernel == kernel
    assert because in found.reason
