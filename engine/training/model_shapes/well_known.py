"""Shapes of well-known models, for those whose files are not on this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from engine.training.model_shapes.shape import ModelShape


def well_known_shape(name: str) -> ModelShape | None:
    """Returns the shape of a well-known model; ignores the owner, ``Instruct`` and versions of the same shape in its name."""
    short = name.lower().rpartition("/")[2].removeprefix("meta-")
    short = re.sub(r"-(instruct|base|chat|it|v0\.3|2[45]\d\d)(?=-|$)", "", short)
    return WELL_KNOWN_SHAPES.get(short)


def _shape(layers: int, hidden: int, heads: int, intermediate: int, *, kv: int = 8, head_dim: int = 128, **family: Any) -> ModelShape:
    return ModelShape(
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=head_dim,
        intermediate=intermediate,
        **{"tied_embeddings": False, **family},
    )


_LLAMA = {"vocab": 128_256, "context_length": 131_072}
_QWEN2 = {"vocab": 152_064, "context_length": 32_768, "qkv_bias": True}
_SMALL_QWEN2 = {**_QWEN2, "vocab": 151_936, "tied_embeddings": True}
_QWEN3 = {"vocab": 151_936, "context_length": 40_960, "qk_norm": True}
_TIED = {"tied_embeddings": True}
WELL_KNOWN_SHAPES: Mapping[str, ModelShape] = {
    "llama-3.1-8b": _shape(32, 4096, 32, 14_336, **_LLAMA),
    "llama-3.1-70b": _shape(80, 8192, 64, 28_672, **_LLAMA),
    "llama-3.3-70b": _shape(80, 8192, 64, 28_672, **_LLAMA),
    "llama-3.2-1b": _shape(16, 2048, 32, 8192, head_dim=64, **_TIED, **_LLAMA),
    "llama-3.2-3b": _shape(28, 3072, 24, 8192, **_TIED, **_LLAMA),
    "qwen2.5-0.5b": _shape(24, 896, 14, 4864, kv=2, head_dim=64, **_SMALL_QWEN2),
    "qwen2.5-1.5b": _shape(28, 1536, 12, 8960, kv=2, **_SMALL_QWEN2),
    "qwen2.5-3b": _shape(36, 2048, 16, 11_008, kv=2, **_SMALL_QWEN2),
    "qwen2.5-7b": _shape(28, 3584, 28, 18_944, kv=4, **_QWEN2),
    "qwen2.5-14b": _shape(48, 5120, 40, 13_824, **_QWEN2),
    "qwen2.5-32b": _shape(64, 5120, 40, 27_648, **_QWEN2),
    "qwen2.5-72b": _shape(80, 8192, 64, 29_568, **_QWEN2),
    "qwen3-0.6b": _shape(28, 1024, 16, 3072, **_TIED, **_QWEN3),
    "qwen3-1.7b": _shape(28, 2048, 16, 6144, **_TIED, **_QWEN3),
    "qwen3-4b": _shape(36, 2560, 32, 9728, **_TIED, **_QWEN3),
    "qwen3-8b": _shape(36, 4096, 32, 12_288, **_QWEN3),
    "qwen3-14b": _shape(40, 5120, 40, 17_408, **_QWEN3),
    "qwen3-32b": _shape(64, 5120, 64, 25_600, **_QWEN3),
    "mistral-7b": _shape(32, 4096, 32, 14_336, vocab=32_768, context_length=32_768),
    "mistral-nemo": _shape(40, 5120, 32, 14_336, vocab=131_072, context_length=131_072),
    "mistral-small-24b": _shape(40, 5120, 32, 32_768, vocab=131_072, context_length=32_768),
}
"""From ``config.json`` of each model's hub repository (meta-llama, Qwen, mistralai). Their sums are the parameter counts of the same
repositories' safetensors; a test checks both."""
