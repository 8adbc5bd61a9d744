"""Which models can have their windows split over ranks, each of which holds a part of the tokens."""

from __future__ import annotations

from engine.training.model_shapes.shape import ModelShape

CONTEXT_SIZES = (1, 2, 4, 8)
"""Ranks that may share a window: those of one node, because every layer exchanges tokens."""


def context_objection(shape: ModelShape, size: int, *, kernel: str, on_cpu: bool) -> str | None:
    """Returns why `size` ranks cannot share the windows of a model whose attention `kernel` computes, to be read after "its windows cannot
    be split over N ranks: "; None if they can.

    1. Layers that pass a state on, or count chunks, read a window from its start.
    2. Attention gets whole windows for some of the heads, without a mask: flash attention; sdpa on a CPU, where windows are short.
    3. Each rank gets equally many heads; heads of keys are repeated where there are fewer than ranks.
    4. Rotary positions must not depend on the longest example of a batch, of which a rank sees a part.
    """
    needs = shape.attention_needs
    if needs.layers:
        return f"it has {needs.layers} layers, which read a window from its start"
    if needs.extra or needs.dropout:
        return f"its attention has {needs.extra or 'dropout'}"
    if kernel != "flash_attention_2" and not (on_cpu and kernel == "sdpa"):
        return f"they need flash_attention_2, and its attention is computed by {kernel} here"
    if shape.num_heads % size:
        return f"its {shape.num_heads} attention heads do not divide by {size}"
    if shape.num_kv_heads % size and size % shape.num_kv_heads:
        return f"its {shape.num_kv_heads} heads of keys and {size} ranks do not divide by each other"
    if shape.varying_rope:
        return f"its rotary positions ({shape.varying_rope}) depend on the longest example of a batch"
    return None
