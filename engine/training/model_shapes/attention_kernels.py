"""Selects the kernel that computes attention, from what the model needs and what the machine has; says why.

    flash_attention_2  PyTorch's flash kernel for sequences of various lengths (``torch.nn.attention.varlen``)
    flex_attention     PyTorch's compiled kernel, which also computes soft caps and sinks
    sdpa               PyTorch's fused attention with a mask of tokens x tokens
    eager              the model's own code: all it needs, and the weights of every pair of tokens in memory

The control plane selects by the pool's type of GPU, for the memory estimate; the training process again by the machine that it runs on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kernel = Literal["flash_attention_2", "flex_attention", "sdpa", "eager"]
Capability = tuple[int, int]
AMPERE: Capability = (8, 0)
"""First compute capability with bfloat16 and with kernels of flash attention."""
FLASH_HEAD_DIM = 256
"""Largest head of the flash kernel, a multiple of 8 (PyTorch, ``check_head_dim_size_flash`` in ``sdp_utils.cpp``)."""
FLEX_HEAD_DIM = 256
SMALL_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))
"""GPUs with 100 KiB of shared memory per multiprocessor (CUDA's programming guide, table of compute capabilities): PyTorch's flash kernel
has no backward pass there for heads of 193 to 224 (``check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120``)."""
FLEX_SMALL_HEAD_DIM = 128
"""Largest head for flex attention on those: its tiles of wider ones may not fit. Assumed; not run."""
ORDER: dict[str, tuple[Kernel, ...]] = {
    "auto": ("flash_attention_2", "flex_attention", "sdpa", "eager"),
    "flash_attention_2": ("flash_attention_2", "flex_attention", "sdpa", "eager"),
    "flex_attention": ("flex_attention", "sdpa", "eager"),
    "sdpa": ("sdpa", "eager"),
    "eager": ("eager",),
}
"""Kernels that are tried for a request, fastest first (docs/gpu.md); eager computes everything, so one is always found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionNeeds:
    """What a model computes in its attention."""

    head_dim: int
    extra: str = ""
    """What it does beyond scaled products, in words: ``soft caps``, ``sinks``."""
    layers: str = ""
    """Kind of layers, in words, whose tokens the flash kernel would not keep apart: ``chunked``, ``recurrent``."""
    dropout: bool = False
    """Whether attention weights are dropped out."""
    flex: bool = True
    """Whether transformers' class of the model works with flex attention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Where a model trains."""

    capability: Capability | None = None
    """Compute capability of the GPU; None: a CPU."""
    missing: str = ""
    """What compiling kernels needs and this machine lacks, in words."""

    @property
    def has_bf16(self) -> bool:
        return self.capability is None or self.capability >= AMPERE


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    kernel: Kernel
    reason: str
    """Why it was chosen, or why each faster one was not."""


def choose(wanted: str, needs: AttentionNeeds, device: Device, *, precision: str, packed: bool) -> Choice:
    """Returns the first kernel of ``ORDER[wanted]`` that computes exactly what the model needs on `device`.

    1. flash_attention_2: Ampere or newer, half precision, heads of at most 256, no soft caps, sinks, dropout, chunked or recurrent layers.
    2. flex_attention: the same GPUs with a compiler, `packed` windows, and heads whose tiles fit; soft caps and sinks are fine.
    3. sdpa: no soft caps or sinks.
    4. eager.

    ``auto`` begins with sdpa without `packed` windows, because answers are rows of their own, and in fp32, for which flash has no kernel.
    """
    names = ORDER["sdpa" if wanted == "auto" and (not packed or precision == "fp32") else wanted]
    against: list[str] = []
    for kernel in names:
        why = objection(kernel, needs, device, precision=precision, packed=packed)
        if why is None:
            return Choice(kernel=kernel, reason="; ".join(against) or f"first choice for {_place(device)} in {precision}")
        against.append(f"{kernel} {why}")
    raise AssertionError("eager attention has objections")


def objection(kernel: str, needs: AttentionNeeds, device: Device, *, precision: str, packed: bool) -> str | None:
    """Returns why `kernel` cannot compute the attention of a model there, to be read after its name; None if it can."""
    if kernel == "eager":
        return None
    if kernel == "sdpa":
        return f"does not compute {needs.extra}" if needs.extra else None
    if device.capability is None:
        return "has no kernels for a CPU"
    if device.capability < AMPERE:
        return f"has no kernels for {_place(device)} (requires 8.0, Ampere, or newer)"
    if needs.dropout:
        return "does not drop out attention weights"
    if needs.layers:
        return f"does not keep examples apart in {needs.layers} layers"
    if kernel == "flash_attention_2":
        return _flash_objection(needs, device, precision)
    return _flex_objection(needs, device, packed=packed)


def _flash_objection(needs: AttentionNeeds, device: Device, precision: str) -> str | None:
    size = needs.head_dim
    if precision == "fp32":
        return "supports only bf16 and fp16, not fp32"
    if needs.extra:
        return f"does not compute {needs.extra}"
    if size > FLASH_HEAD_DIM or size % 8:
        return f"takes heads of at most {FLASH_HEAD_DIM} in multiples of 8, not {size}"
    if device.capability in SMALL_SHARED_MEMORY and 192 < size <= 224:
        return f"has no backward pass for heads of {size} on {_place(device)}"
    return None


def _flex_objection(needs: AttentionNeeds, device: Device, *, packed: bool) -> str | None:
    largest = FLEX_SMALL_HEAD_DIM if device.capability in SMALL_SHARED_MEMORY else FLEX_HEAD_DIM
    if not packed:
        return "requires packed windows"
    if device.missing:
        return f"compiles its kernel, but {device.missing} is not installed"
    if not needs.flex:
        return "is not supported by transformers for this model"
    if needs.head_dim > largest:
        return f"takes heads of at most {largest} on {_place(device)}, not {needs.head_dim}"
    return None


def _place(device: Device) -> str:
    return "a CPU" if device.capability is None else "compute capability {}.{}".format(*device.capability)
