"""Input of an estimate: one rank of one way to train one model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine.training import methods
from engine.training.model_shapes import ModelShape
from engine.training.spec import Attention, Quantization, Strategy

SIDES = {"windows": 1, "pairs": 2, "judged": 1}
"""Sequences per row: both answers of a pair go through the model together."""
REPLICATED = frozenset({"single", "ddp"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    shape: ModelShape
    adapter: Literal["lora", "qlora", "full"]
    method: str = "sft"
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    max_seq_len: int
    per_device_batch_size: int = 1
    rank: int = 16
    """Rank of the adapter; ignored for ``full``."""
    dropout: float = 0.05
    use_dora: bool = False
    keeps_whole: bool = False
    """Whether every GPU must hold the whole model and all states, as for DoRA and PiSSA, which read whole weights."""
    optimizer: str = "adamw_torch"
    quantization: Quantization = field(default_factory=Quantization)
    """For ``qlora``."""
    attention: Attention = "sdpa"
    train_experts: bool = True
    """For ``full``: whether experts are trained; an adapter leaves them as they are."""
    train_router: bool = False
    gradient_checkpointing: bool = True
    strategy: Strategy = "single"
    world_size: int = 1
    context_parallel: int = 1
    """Ranks that share each window."""
    on_cpu: bool = False

    @property
    def full(self) -> bool:
        return self.adapter == "full"

    @property
    def sequences(self) -> int:
        return self.per_device_batch_size * SIDES[methods.method_named(self.method).pack]

    @property
    def tokens(self) -> int:
        """Tokens that go through the model together on one rank. Every window is full; answers have the maximum length."""
        return -(-self.sequences * self.max_seq_len // self.context_parallel)

    @property
    def data_ranks(self) -> int:
        """Ranks, or groups of ranks that share windows, with rows of their own."""
        return self.world_size // self.context_parallel

    @property
    def kv_size(self) -> int:
        """Numbers per token in keys, and in values, during attention: heads are repeated if ranks that share a window outnumber them."""
        return self.shape.kv_size * max(1, self.context_parallel // self.shape.num_kv_heads)

    @property
    def exchanged_bytes(self) -> int:
        """Bytes that a rank sends to those that share its windows for one pass through one layer: queries, keys, values, and the result."""
        return self.compute_bytes * self.tokens * (2 * self.shape.q_size + 2 * self.kv_size) if self.context_parallel > 1 else 0

    @property
    def mask_elements(self) -> int:
        """Elements of the attention mask: each window or answer is a row with a mask of its own."""
        return self.sequences * self.max_seq_len**2

    @property
    def compute_bytes(self) -> int:
        """Bytes per number in a matrix product."""
        return 4 if self.precision == "fp32" else 2

    @property
    def half(self) -> bool:
        return self.precision != "fp32"

    @property
    def stream_bytes(self) -> int:
        """Bytes per number between blocks, as output by the embedding. FSDP2 and ZeRO compute with parameters cast beforehand."""
        return 4 if self.full and self.strategy in REPLICATED else self.compute_bytes

    @property
    def autocasts(self) -> bool:
        """Whether matrix products cast float32 inputs on the fly."""
        return self.half and self.strategy in REPLICATED

    @property
    def trained_parameters(self) -> int:
        s = self.shape
        if not self.full:
            return s.lora_parameters(self.rank)
        frozen = (0 if self.train_experts else s.expert_parameters) + (0 if self.train_router else s.router_parameters)
        return s.decoder_parameters - frozen

    @property
    def eager(self) -> bool:
        """Whether attention weights of all pairs of tokens are held: no fused kernel computes them (``runtime.model.attention``)."""
        return self.attention == "eager"

    @property
    def masked(self) -> bool:
        """Whether attention reads a mask of all pairs of tokens."""
        return self.attention == "sdpa" or self.eager
