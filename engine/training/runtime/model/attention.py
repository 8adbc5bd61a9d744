"""Attention over packed windows: the implementation of each kernel, and its requirements on a batch.

sdpa               exact for most families. Packed windows need a mask of tokens x tokens, for which PyTorch has no flash kernel
flex_attention     GPUs: skips the empty blocks of the mask. Compiled for one shape, so windows are padded to one length
flash_attention_2  GPUs: PyTorch's own flash kernel for sequences of various lengths. Windows of a micro-batch are joined to one row, and
                   decoder blocks are compiled (``compilation.py``)
eager              the model's own code

``attention_kernels`` chooses between them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward

from engine.training.model_shapes import from_config
from engine.training.model_shapes.attention_kernels import AttentionNeeds, Choice, Device, choose
from engine.training.runtime.model import decoder, split_windows
from engine.training.runtime.model.split_windows import Context

FLEX, FLASH = "flex_attention", "flash_attention_2"
VARLEN = "varlen"
"""Name under which models know PyTorch's flash kernel; for ``flash_attention_2`` they would look for the flash-attn package."""
SPLIT = "context_parallel"
"""Name under which models know the kernel if ranks share windows."""
JOINED = frozenset((VARLEN, SPLIT))
"""Implementations that expect the windows of a micro-batch in one row, with the boundaries of its examples."""
BLOCK = 128
"""Tokens per block of flex attention's mask."""
GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""PyTorch before 2.12 accepts fewer heads of keys than of queries without being asked."""


def chosen(wanted: str, device: torch.device, config: Any, *, precision: str, packed: bool) -> Choice:
    """Returns the kernel for a model of `config` on this machine: `wanted`, or what computes all that the model does where that cannot."""
    return choose(wanted, needs(config), device_of(device), precision=precision, packed=packed)


def needs(config: Any) -> AttentionNeeds:
    """Returns what a model of `config` (transformers' own) computes in its attention. Of one whose sizes are not known, layers count as
    unknown, so that it gets sdpa or its own code."""
    known = decoder.model_class(config)
    try:
        found = from_config(config.to_dict()).attention_needs
    except ValueError:
        found = AttentionNeeds(head_dim=0, layers="unknown")
    extra = found.extra or ("" if known._supports_sdpa else "all that this model does")
    return replace(found, extra=extra, flex=bool(known._supports_flex_attn))


def device_of(device: torch.device) -> Device:
    """Returns the capability of this machine's `device`, and what it lacks for compiling kernels."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    needed = (("Triton", capability is None or _importable("triton")), ("a C compiler", _compiler()))
    missing = [name for name, there in needed if not there]
    return Device(capability=capability, missing=" and ".join(missing))


def register(choice: Choice, *, max_seq_len: int, context: Context | None = None) -> str:
    """Makes the chosen kernel available to models and returns their name for it. `context`: ranks that share windows with this one."""
    varlen = functools.partial(varlen_attention, longest=max_seq_len)
    if context is not None:
        inner = varlen if choice.kernel == FLASH else masked_attention
        AttentionInterface.register(SPLIT, functools.partial(_split, context=context, inner=inner))
        return SPLIT
    if choice.kernel == FLASH:
        AttentionInterface.register(VARLEN, varlen)
        return VARLEN
    if choice.kernel == FLEX:
        AttentionInterface.register(FLEX, _flex)
    return choice.kernel


def of(model: Any) -> str:
    """Returns the implementation that the text decoder of `model` uses."""
    return str(model.config.get_text_config(decoder=True)._attn_implementation)


def window_length(attention: str, max_seq_len: int) -> int | None:
    """Returns the length to which every window is padded; None: the longest of its micro-batch."""
    return -(-max_seq_len // BLOCK) * BLOCK if attention == FLEX else None


@contextlib.contextmanager
def reference(model: Any) -> Iterator[None]:
    """Uses sdpa (or eager, if the model needs it) and compiles nothing: other implementations are compared with this one."""
    config = model.config.get_text_config(decoder=True)
    own = config._attn_implementation
    config._attn_implementation = choose("sdpa", needs(model.config), Device(), precision="fp32", packed=False).kernel
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        config._attn_implementation = own


def _flex(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any) -> Any:
    query, key, value = _cast(query, key, value)
    return flex_attention_forward(module, query, key, value, attention_mask, **options)


def varlen_attention(
    _module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: Any,
    *,
    longest: int,
    scaling: float,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each sequence, from shapes (rows, heads, tokens, size) to (rows, tokens, heads, size).

    `cu_seq_lens_q`: where sequences of the flattened rows begin, and the end of the last. Without it each row is a sequence; padding on its
    right needs no mask, because no earlier token sees it. `longest`: a bound, and the same for every batch, so that blocks are compiled
    once.
    """
    rows, _heads, tokens, _size = query.shape
    if cu_seq_lens_q is None:
        cu_seq_lens_q = torch.arange(0, (rows + 1) * tokens, tokens, dtype=torch.int32, device=query.device)
    left = -1 if sliding_window is None else sliding_window - 1
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in _cast(query, key, value))
    found: Any = varlen_attn(
        query, key, value, cu_seq_lens_q, cu_seq_lens_q, longest, longest, scale=scaling, window_size=(left, 0), **GROUPED
    )
    return found.unflatten(0, (rows, tokens)), None


def masked_attention(
    _module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: Any,
    *,
    cu_seq_lens_q: torch.Tensor,
    scaling: float,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The same as :func:`varlen_attention` for one row, by sdpa with a mask of tokens x tokens: for CPUs."""
    place = torch.arange(query.shape[2], dtype=cu_seq_lens_q.dtype, device=query.device)
    example = torch.searchsorted(cu_seq_lens_q, place, right=True)
    seen = (example[:, None] == example[None]) & (place[:, None] >= place[None])
    if sliding_window is not None:
        seen &= place[:, None] - place[None] < sliding_window
    found = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True)
    return found.transpose(1, 2), None


def _split(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any) -> Any:
    query, key, value = _cast(query, key, value)
    return split_windows.attention(module, query, key, value, mask, **options)


def _cast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Autocast handles sdpa but not these: rotary positions give float32 queries and keys beside half-precision values."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in tensors)


def _importable(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _compiler() -> bool:
    return any(shutil.which(name) for name in ("cc", "gcc", "clang"))
