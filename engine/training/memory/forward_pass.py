"""GPUs of one node that together hold a whole model for passes without gradients: evaluations, and reference log-probabilities.

A GPU gets whole layers. transformers (``device_map="balanced"``) gives it at most its share of the weights and 1.25 times the largest part
that is not divided: a layer, or an embedding.
"""

from __future__ import annotations

from engine.training.memory.estimates import RESERVE_SHARE
from engine.training.memory.gpus import CONTEXT_BYTES
from engine.training.model_shapes import ModelShape

ROW_TOKENS = 2048
"""Tokens of the row that must fit. Batches that do not are halved, down to one row; prompts with their answers are shorter than this."""
LOGIT_BYTES = 4 * 3
"""Bytes for each logit of a row: float32, and the copies that a softmax makes."""
UNDIVIDED = 1.25
NUM_ADAPTERS = 2
"""The adapter and the last accepted one, in float32 beside the weights."""


def per_gpu_bytes(shape: ModelShape, num_gpus: int, *, rank: int = 0, compute_bytes: int = 2) -> int:
    """Return the peak of the fullest of `num_gpus`; `rank`: of the adapters, 0 if there are none.

    The reserve is of everything but the weights, which are loaded once, into blocks of their own size.
    """
    adapters = NUM_ADAPTERS * 4 * shape.lora_parameters(rank) / num_gpus
    cache = 2 * compute_bytes * shape.num_layers * shape.kv_size * ROW_TOKENS / num_gpus
    activations = compute_bytes * (3 * shape.mlp_width + 4 * shape.hidden) * ROW_TOKENS
    logits = LOGIT_BYTES * shape.vocab * ROW_TOKENS
    return (
        round(weight_bytes(shape, num_gpus, compute_bytes=compute_bytes) + (1 + RESERVE_SHARE) * (adapters + cache + activations + logits))
        + CONTEXT_BYTES
    )


def weight_bytes(shape: ModelShape, num_gpus: int, *, compute_bytes: int = 2) -> float:
    """Return the weights on the fullest of `num_gpus`."""
    largest = max(shape.layer_parameters, shape.vocab * shape.hidden) if num_gpus > 1 else 0
    return compute_bytes * (shape.num_parameters / num_gpus + UNDIVIDED * largest)


def forward_pass_gpus(shape: ModelShape, memory_bytes: int, *, rank: int = 0, compute_bytes: int = 2) -> int | None:
    """Return the fewest GPUs of `memory_bytes` each that hold the model; None if no number does, because a layer is too large.

    No headroom is kept: a batch that is too large is halved.
    """
    counts = range(1, shape.num_layers + 1)
    return next((n for n in counts if per_gpu_bytes(shape, n, rank=rank, compute_bytes=compute_bytes) <= memory_bytes), None)
