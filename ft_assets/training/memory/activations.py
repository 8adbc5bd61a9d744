"""Activations: what the forward pass keeps for the backward pass, by what autograd saves in each operation.

The count follows Korthikanti et al. 2022 (Reducing Activation Recomputation in Large Transformer Models, section 4), adapted to this block:
RMS norms computed in float32, grouped-query attention whose scores are never stored (no term in the square of the length but the mask), a
gated MLP, no dropout outside LoRA. A frozen layer saves no input, an adapted one saves a copy for its LoRA pair.

T tokens, h hidden, f intermediate, q and kv widths of queries and keys, b bytes of a number in a product::

    norms      2 x 4 T h  (+ 2 x stream T h of the normed values, if the norm is trained)
    q, k, v    b T (q + 2 kv); with a mask keys and values are repeated to b T 3 q
    attention  b T q out, 4 T heads; with a mask its float copy, b for each pair of positions
    MLP        3 b T f  (gate, its activation, up)
    inputs     of the linear layers, see :func:`_linear_inputs`
"""

from __future__ import annotations

from ft_assets.training.memory.cases import Case

HEAD_TILE_TOKENS = 4096
HEAD_TILE_VOCAB = 32_768
"""Tile of logits in which TRL's fused output layer scores labels (``ChunkedLogProbFunction``)."""


def layer_saved(case: Case) -> int:
    """Bytes that one block saves."""
    s, t, b = case.shape, case.tokens, case.compute_bytes
    norms = 2 * 4 * t * s.hidden + (2 * case.stream_bytes * t * s.hidden if case.full else 0)
    if s.qk_norm:
        norms += (4 + (b if case.full else 0)) * t * (s.q_size + s.kv_size)
    masked = case.attention == "sdpa"
    keys = s.q_size if masked else s.kv_size
    attention = b * t * (2 * s.q_size + 2 * keys) + 4 * t * s.num_heads
    mask = b * case.mask_elements if masked else 0
    return norms + attention + mask + 3 * b * t * s.intermediate + _linear_inputs(case)


def _linear_inputs(case: Case) -> int:
    """Inputs of the seven linear layers of a block, where they are saved beyond what is saved anyway.

    Layers share an input only if nothing is done to it first: under autocast each casts its own copy, and each LoRA pair has a dropout of
    its own, whose result and mask it saves (one byte an element on a GPU, a float32 factor on a CPU).
    """
    s, t, b = case.shape, case.tokens, case.compute_bytes
    each = sum(i for i, _ in s.linears)
    shared = 2 * s.hidden + s.intermediate
    """Of q, k, v together, of gate and up together, and of down; o reads what attention saves."""
    if case.full:
        return b * t * (each - s.q_size if case.autocasts else shared)
    pairs = len(s.linears) * case.rank * b * t
    if case.dropout:
        return pairs + (b + (4 if case.on_cpu else 1)) * t * each
    return pairs + b * t * (each if case.half else shared)


def saved(case: Case) -> int:
    """Bytes that the whole forward pass saves, output layer apart."""
    s, t = case.shape, case.tokens
    boundary = case.stream_bytes * t * s.hidden
    per_layer = boundary if case.gradient_checkpointing else layer_saved(case)
    final_norm = (4 + (case.stream_bytes if case.full else 0)) * t * s.hidden
    mask = case.mask_elements if case.attention == "sdpa" else 0
    return s.num_layers * per_layer + boundary + final_norm + mask + 2 * case.stream_bytes * t * s.head_dim


def backward_working(case: Case) -> int:
    """Gradients alive at once in the widest place, the MLP of a block, and the block itself if it is recomputed for it."""
    s, t, b = case.shape, case.tokens, case.compute_bytes
    wide = 3 * b * t * s.intermediate
    if not case.full and case.half:
        wide += 8 * t * s.intermediate
        """LoRA computes in float32 between its dropout and the cast of its product."""
    return wide + 2 * case.stream_bytes * t * s.hidden + (layer_saved(case) if case.gradient_checkpointing else 0)


def head_forward(case: Case) -> int:
    """Output layer in the forward pass. Every method scores its labels in tiles of logits; here every token has a label."""
    hidden = (case.compute_bytes + case.stream_bytes) * case.tokens * case.shape.hidden
    return hidden + _tile(case, cpu_copies=3)


def head_backward(case: Case) -> int:
    """The same with its gradients; a trained output layer adds a float32 gradient of its own size before it is accumulated."""
    s = case.shape
    weight = 4 * s.vocab * s.hidden if case.full else 0
    return weight + (4 + case.compute_bytes + case.stream_bytes) * case.tokens * s.hidden + _tile(case, cpu_copies=7)


def _tile(case: Case, *, cpu_copies: int) -> int:
    """A GPU allocates the whole tile; a CPU touches the vocabulary's part of it, and computes in `cpu_copies` float32 copies."""
    rows = min(case.tokens, HEAD_TILE_TOKENS)
    if case.on_cpu:
        return rows * min(case.shape.vocab, HEAD_TILE_VOCAB) * (case.compute_bytes + 4 * cpu_copies)
    return rows * HEAD_TILE_VOCAB * case.compute_bytes
