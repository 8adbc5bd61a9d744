"""Shapes of decoder-only models: layer sizes from a ``config.json``, and those of well-known models.

The supported families (Llama, Mistral, Qwen2, Qwen3) have the same block: RMS norms, grouped-query attention with rotary positions, a gated
MLP. They differ in biases, norms of queries and keys, and tied embeddings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

QKV_BIAS = frozenset({"qwen2"})
"""Families with a bias on queries, keys and values, whatever their config says."""
QK_NORM = frozenset({"qwen3"})
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Config keys of mixtures of experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied_embeddings: bool
    """Whether the output layer shares the embedding's weights."""
    context_length: int
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    assumed: bool = False
    """The model's own shape is unknown; this is a similar one of at least its size."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Reads the content of ``config.json``. Raises ``ValueError`` if it is not a dense decoder of these families."""
        if experts := next((name for name in EXPERTS if (config.get(name) or 0) > 1), None):
            raise ValueError(f"{experts} is {config[experts]}: mixtures of experts are not estimated")
        family = str(config.get("model_type", "llama"))
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            bias = bool(config.get("attention_bias") or False)
            return cls(
                num_layers=int(config["num_hidden_layers"]),
                hidden=hidden,
                num_heads=heads,
                num_kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                intermediate=int(config["intermediate_size"]),
                vocab=int(config["vocab_size"]),
                tied_embeddings=bool(config.get("tie_word_embeddings", False)),
                context_length=int(config.get("max_position_embeddings") or 0),
                qkv_bias=bias or family in QKV_BIAS,
                o_bias=bias,
                mlp_bias=bool(config.get("mlp_bias") or False),
                qk_norm=family in QK_NORM,
            )
        except KeyError as missing:
            raise ValueError(f"config.json of a {family} has no {missing}; its memory cannot be estimated") from None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """Returns (inputs, outputs) of the seven linear layers of a block: q, k, v, o, gate, up, down."""
        h, f, q, kv = self.hidden, self.intermediate, self.q_size, self.kv_size
        return ((h, q), (h, kv), (h, kv), (q, h), (h, f), (h, f), (f, h))

    @property
    def linear_parameters(self) -> int:
        """Weights of the linear layers of all blocks, which LoRA adapts and QLoRA quantizes."""
        return self.num_layers * sum(i * o for i, o in self.linears)

    @property
    def embedding_parameters(self) -> int:
        """Embedding and, unless tied, output layer."""
        return self.vocab * self.hidden * (1 if self.tied_embeddings else 2)

    @property
    def small_parameters(self) -> int:
        """Norms and biases, neither adapted nor quantized."""
        per_layer = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        per_layer += (self.q_size + 2 * self.kv_size) * self.qkv_bias + self.hidden * self.o_bias
        per_layer += (2 * self.intermediate + self.hidden) * self.mlp_bias
        return self.num_layers * per_layer + self.hidden

    @property
    def num_parameters(self) -> int:
        return self.linear_parameters + self.embedding_parameters + self.small_parameters

    @property
    def layer_parameters(self) -> int:
        """Parameters of one block: what sharded training gathers at a time."""
        return (self.linear_parameters + self.small_parameters - self.hidden) // self.num_layers

    def lora_parameters(self, rank: int) -> int:
        """Parameters of an adapter on every linear layer of the blocks."""
        return self.num_layers * rank * sum(i + o for i, o in self.linears)


def of(model_id: str, *, directory: Path | None = None, repo: str = "", num_parameters: int = 0) -> ModelShape:
    """Returns the shape of a base model, from its ``config.json``, its name, or a similar model (then ``assumed``).

    Raises ``ValueError`` if there is a config that is not of a dense decoder.
    """
    if directory is not None and (directory / "config.json").is_file():
        return ModelShape.from_config(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    found = named(model_id) or named(repo)
    if found is not None:
        return found
    by_size = sorted(NAMED.values(), key=lambda s: s.num_parameters)
    return replace(next((s for s in by_size if s.num_parameters >= num_parameters), by_size[-1]), assumed=True)


def named(name: str) -> ModelShape | None:
    """Returns the shape of a well-known model; ignores the owner, ``Instruct`` and versions of the same shape in its name."""
    short = name.lower().rpartition("/")[2].removeprefix("meta-")
    short = re.sub(r"-(instruct|base|chat|it|v0\.3|2[45]\d\d)(?=-|$)", "", short)
    return NAMED.get(short)


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
NAMED: Mapping[str, ModelShape] = {
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
