"""Peak bytes of one rank, part by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.training import methods
from engine.training.memory.cases import REPLICATED, Case
from engine.training.memory.gpus import CPU_PROCESS_BYTES, GIB, context_bytes

RESERVE_SHARE = 0.06
"""Share of all allocations: blocks that the caching allocator holds but cannot use."""
ZERO3_LIVE_PARAMETERS = 1_000_000_000
"""Parameters that ZeRO-3 keeps gathered at most (``stage3_max_live_parameters``, its default)."""
ZERO_BUCKET = 500_000_000
"""Elements that ZeRO reduces at a time (``reduce_bucket_size``, its default)."""
MEANINGS: Mapping[str, str] = {
    "weights": "base model weights",
    "master_weights": "float32 copy that the optimizer updates",
    "adapter": "LoRA matrices in float32",
    "gradients": "gradients of trained parameters",
    "optimizer": "optimizer state of trained parameters",
    "compute_copies": "half-precision copies of float32 weights, made by autocast",
    "gathered": "parameters, gradients and tokens of other ranks, held temporarily",
    "activations": "saved by the forward pass for the backward pass",
    "working": "gradients of activations, and the block being recomputed",
    "logits": "output layer and loss",
    "context": "CUDA context and NCCL, or the process itself on a CPU",
    "reserve": "fragmentation of the allocator",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    parts: Mapping[str, int]
    """Bytes by part, in the order of ``MEANINGS``: the parts that are alive at the peak."""
    phase: str
    """Moment of the peak: ``forward``, ``loss``, ``backward`` or ``step``."""

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())

    def explain(self) -> list[str]:
        """Returns a line for each nonzero part, and the total."""
        lines = [f"{name}: {bytes_ / GIB:.2f} GiB, {MEANINGS[name]}" for name, bytes_ in self.parts.items() if bytes_]
        return [*lines, f"total: {self.total_bytes / GIB:.2f} GiB, peak during: {self.phase}"]


def estimate(case: Case, *, overheads: bool = True) -> MemoryEstimate:
    """Returns the peak of one rank. Without `overheads`, neither the device's context nor a reserve is added: tensors alone."""
    held = _held(case)
    copies, gathered = compute_copies(case), _gathered(case) + 2 * case.exchanged_bytes  # sent and received
    kept = 0 if case.gradient_checkpointing and case.full else copies
    forward = copies if case.on_cpu else kept  # GPUs cache no copies: ``runtime.precision``
    saved = activation_bytes(case)
    phases: dict[str, dict[str, int]] = {
        "forward": {
            "compute_copies": forward,
            "gathered": gathered,
            "activations": saved,
            "working": dora_working_bytes(case),
            "logits": head_forward_bytes(case),
        },
        "loss": {"compute_copies": kept, "gathered": gathered, "activations": saved, "logits": head_backward_bytes(case)},
        "backward": {
            "compute_copies": kept,
            "gathered": gathered,
            "activations": saved,
            "working": backward_working_bytes(case) + (dora_working_bytes(case) if case.gradient_checkpointing else 0),
        },
        "step": {"working": _step_working(case)},
    }
    phase = max(phases, key=lambda name: sum(phases[name].values()))
    parts = held | phases[phase]
    if overheads:
        parts["reserve"] = round(RESERVE_SHARE * sum(parts.values()))
        parts["context"] = CPU_PROCESS_BYTES if case.on_cpu else context_bytes(case.world_size)
    return MemoryEstimate(parts={name: parts.get(name, 0) for name in MEANINGS}, phase=phase)


def _held(case: Case) -> dict[str, int]:
    """Parts that are always allocated. Includes gradients, which are accumulated over the micro-batches of a step."""
    trained, world = case.trained_parameters, case.world_size
    zero = case.strategy.startswith("zero")
    shards_weights, shards_gradients = case.strategy in ("fsdp2", "zero3"), case.strategy in ("fsdp2", "zero2", "zero3")
    trained_bytes = 2 if zero and case.half else 4
    weights = _weights(case, trained_bytes) // (world if shards_weights else 1)
    adapter = 0 if case.full else trained * trained_bytes // (world if shards_weights else 1)
    return {
        "weights": weights,
        "master_weights": trained * 4 // world if zero and case.half else 0,
        "adapter": adapter,
        "gradients": trained * trained_bytes // (world if shards_gradients else 1),
        "optimizer": _optimizer(case) // (1 if case.strategy in REPLICATED else world),
    }


def _weights(case: Case, trained_bytes: int) -> int:
    s, b = case.shape, case.compute_bytes
    if case.full:
        return s.num_parameters * trained_bytes
    if case.adapter == "lora":
        return s.num_parameters * b
    return round(s.linear_parameters * quantized_bytes(double=case.quantization.double)) + b * (s.num_parameters - s.linear_parameters)


def quantized_bytes(*, double: bool) -> float:
    """Bytes of a 4-bit parameter with its constants: one float32 per 64 weights, or 8 bits and a float32 per 256 of those (QLoRA,
    section 3)."""
    return 0.5 + (1 / 64 + 4 / (64 * 256) if double else 4 / 64)


def _optimizer(case: Case) -> int:
    """Bytes of optimizer state: two moments in float32, in 8 bits with a float32 per 256 each, or rows and columns of one (Adafactor)."""
    trained, s = case.trained_parameters, case.shape
    if case.optimizer == "adafactor":
        if not case.full:
            return 4 * s.num_layers * sum(i + o + 2 * case.rank for i, o in s.linears)
        tables = s.embedding_parameters // s.hidden
        experts = s.num_moe_layers * s.num_experts * (2 * s.hidden + 3 * s.expert_intermediate) if case.train_experts else 0
        return 4 * (s.num_layers * sum(i + o for i, o in s.linears) + experts + tables + 2 * s.hidden + s.small_parameters)
    if case.optimizer == "adamw_8bit":
        return round(trained * 2 * (1 + 4 / 256))
    return trained * 8


def compute_copies(case: Case) -> int:
    """Autocast keeps the half-precision copy of each float32 weight until the forward pass ends; the backward pass uses it."""
    if not case.autocasts:
        return 0
    return case.compute_bytes * (case.shape.linear_parameters + case.shape.expert_parameters if case.full else case.trained_parameters)


def _gathered(case: Case) -> int:
    """Buffers for the exchange between ranks.

    FSDP2: the block in use and the next one, the embeddings throughout, and the gradients of a block before and after the cast for their
    reduction. ZeRO-3: parameters up to its limit; ZeRO-1 to 3: two buckets of gradients. QLoRA: the weight being dequantized.
    """
    s, b, world = case.shape, case.compute_bytes, case.world_size
    largest = max(i * o for i, o in s.linears)
    dequantized = b * largest if case.adapter == "qlora" else 0
    if world == 1 or case.strategy in REPLICATED:
        return dequantized
    if case.strategy == "fsdp2":
        trained = (s.layer_parameters + s.embedding_parameters) if case.full else s.lora_parameters(case.rank) // s.num_layers
        return b * (2 * s.layer_parameters + s.embedding_parameters) + (b + 4) * trained
    buckets = 2 * 2 * min(ZERO_BUCKET, case.trained_parameters)
    live = b * min(ZERO3_LIVE_PARAMETERS, s.num_parameters) if case.strategy == "zero3" else 0
    return dequantized + buckets + live


def _step_working(case: Case) -> int:
    """Adafactor computes an update the size of a parameter, in float32; AdamW is one fused kernel on a GPU and a loop on a CPU.

    ZeRO first casts the half-precision gradients of its share to float32.
    """
    s = case.shape
    cast = 4 * case.trained_parameters // case.world_size if case.strategy.startswith("zero") and case.half else 0
    stack = s.num_experts * 2 * s.expert_intermediate if case.train_experts else 0
    wide = max(s.intermediate, stack)
    largest = max(s.vocab * s.hidden, s.hidden * wide) if case.full else case.rank * max(s.hidden, s.intermediate)
    if case.optimizer == "adafactor":
        return cast + 3 * 4 * largest
    return cast + (2 * 4 * largest if case.on_cpu else 0)


HEAD_TILE_TOKENS = 4096
HEAD_TILE_VOCAB = 32_768
"""Tile of logits in which TRL's fused output layer scores answers (``ChunkedLogProbFunction``)."""
SLICE_BYTES = 2**29
"""Float32 logits of a slice in which windows are scored on a GPU (``MAX_LOGIT_BYTES`` in ``runtime/objectives/token_logps.py``)."""


EAGER_COPIES = 2
"""Half-precision copies of attention weights that eager attention saves beside the float32 result of its softmax: capped, and cast."""


EAGER_GRADIENTS_BYTES = 8
"""Bytes per attention weight of eager attention's backward pass: the softmax's gradient and its product, in float32. Not measured
on a GPU."""


def layer_activation_bytes(case: Case) -> int:
    """Returns the bytes that one block saves."""
    s, t, b = case.shape, case.tokens, case.compute_bytes
    norms = 2 * 4 * t * s.hidden + (2 * case.stream_bytes * t * s.hidden if case.full else 0)
    if s.qk_norm:
        norms += (4 + (b if case.full else 0)) * t * (s.q_size + s.kv_size)
    keys = s.q_size if case.masked else case.kv_size
    attention = b * t * (2 * s.q_size + 2 * keys) + 4 * t * s.num_heads
    mask = b * case.mask_elements if case.masked else 0
    if case.eager:
        mask += (4 + EAGER_COPIES * b) * s.num_heads * case.mask_elements
    copies = 2 * b * t * s.experts_per_token * s.hidden  # each chosen expert reads and writes rows of its own
    return norms + attention + mask + copies + 3 * b * t * s.mlp_width + _linear_input_bytes(case) + _dora_bytes(case)


def _dora_bytes(case: Case) -> int:
    """DoRA scales the outputs of the base and of the adapter by each row's length, and saves both for the gradient of the lengths."""
    return 2 * case.compute_bytes * case.tokens * sum(o for _, o in case.shape.linears) if case.use_dora else 0


def dora_working_bytes(case: Case) -> int:
    """DoRA's norms of the rows of base and adapter together: PEFT multiplies the adapter's matrices with an identity of the input's width
    (float32, and cast), and adds the product to the weight. Not measured on a GPU."""
    if not case.use_dora:
        return 0
    b = case.compute_bytes
    return max((4 + (b if case.half else 0)) * i * i + (4 + 3 * b) * i * o for i, o in case.shape.linears)


def _linear_input_bytes(case: Case) -> int:
    """Inputs of the seven linear layers of a block that are saved in addition to other activations.

    Layers share an input only if it is not transformed first: under autocast each casts its own copy, and each LoRA pair has its own
    dropout, whose result and mask it saves (one byte per element on a GPU, a float32 factor on a CPU).
    """
    s, t, b = case.shape, case.tokens, case.compute_bytes
    each = sum(i for i, _ in s.linears)
    shared = 2 * s.hidden + s.mlp_width
    """Inputs of q, k, v together, of gate and up together, and of down; o reads what attention saves."""
    if case.full:
        return b * t * (each - s.q_size if case.autocasts else shared)
    pairs = len(s.linears) * case.rank * b * t
    if case.dropout:
        return pairs + (b + (4 if case.on_cpu else 1)) * t * each
    return pairs + b * t * (each if case.half else shared)


def activation_bytes(case: Case) -> int:
    """Returns the bytes that the whole forward pass saves, without the output layer."""
    s, t = case.shape, case.tokens
    boundary = case.stream_bytes * t * s.hidden
    per_layer = boundary if case.gradient_checkpointing else layer_activation_bytes(case)
    final_norm = (4 + (case.stream_bytes if case.full else 0)) * t * s.hidden
    mask = case.mask_elements if case.masked else 0
    return s.num_layers * per_layer + boundary + final_norm + mask + 2 * case.stream_bytes * t * s.head_dim


def backward_working_bytes(case: Case) -> int:
    """Gradients alive simultaneously in the widest part, the MLP of a block, plus the block itself if it is recomputed."""
    s, t, b = case.shape, case.tokens, case.compute_bytes
    wide = 3 * b * t * s.mlp_width
    if not case.full and case.half:
        wide += 8 * t * s.mlp_width
        """LoRA computes in float32 between its dropout and the cast of its product."""
    eager = EAGER_GRADIENTS_BYTES * s.num_heads * case.mask_elements if case.eager else 0
    return eager + wide + 2 * case.stream_bytes * t * s.hidden + (layer_activation_bytes(case) if case.gradient_checkpointing else 0)


def head_forward_bytes(case: Case) -> int:
    """Output layer in the forward pass. Every method scores its labels in tiles or slices of logits; the estimate assumes that every token
    has a label."""
    hidden = (case.compute_bytes + case.stream_bytes) * case.tokens * case.shape.hidden
    return hidden + _tile_bytes(case, cpu_copies=3, gpu_copies=2)


def head_backward_bytes(case: Case) -> int:
    """The same with its gradients.

    A trained output layer adds a gradient of its own size before accumulation. On a GPU, slices of windows add theirs up one by one, with
    autocast each beside the gradient that the product returns in half precision; while a slice's logits live, so does the layer's copy
    in half precision. At 8B that is 2 GiB more than one gradient (measured: `benchmarks/gpu_h200_202611.json`, ``full-8b``).
    """
    hidden = (4 + case.compute_bytes + case.stream_bytes) * case.tokens * case.shape.hidden
    tile = _tile_bytes(case, cpu_copies=7, gpu_copies=3)
    if not case.full:
        return hidden + tile
    weight = case.shape.vocab * case.shape.hidden
    if case.on_cpu or not _slices(case):
        return hidden + 4 * weight + tile
    cast, gradient = (case.compute_bytes if case.autocasts else 0), case.stream_bytes
    earlier = gradient * weight if _slices(case) > 1 else 0
    return hidden + earlier + max(cast * weight + tile, (cast + gradient) * weight)


def _slices(case: Case) -> int:
    """Slices of logits in which a micro-batch of windows is scored; 0 for methods that score answers in TRL's tiles."""
    return -(-4 * case.tokens * case.shape.vocab // SLICE_BYTES) if methods.method_named(case.method).pack == "windows" else 0


def _tile_bytes(case: Case, *, cpu_copies: int, gpu_copies: int) -> int:
    """A CPU touches the vocabulary's part of TRL's tile and computes in `cpu_copies` float32 copies. A GPU allocates the whole tile, or
    `gpu_copies` of a slice in float32: logits, log-probabilities and the gradients of both, never more at once."""
    rows = min(case.tokens, HEAD_TILE_TOKENS)
    if case.on_cpu:
        return rows * min(case.shape.vocab, HEAD_TILE_VOCAB) * (case.compute_bytes + 4 * cpu_copies)
    if _slices(case):
        return gpu_copies * min(SLICE_BYTES, 4 * case.tokens * case.shape.vocab)
    return rows * HEAD_TILE_VOCAB * case.compute_bytes
