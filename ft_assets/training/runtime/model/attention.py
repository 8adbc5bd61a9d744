"""Attention over packed windows: the implementation for each value of the spec, and its requirements on a batch.

sdpa               exact everywhere. Packed windows need a mask of tokens x tokens, for which PyTorch has no flash kernel
flex_attention     GPUs: skips the empty blocks of the mask. Compiled for one shape, so windows are padded to one length
flash_attention_2  GPUs: PyTorch's own flash kernel for sequences of various lengths. Windows of a micro-batch are joined to one row, and
                   decoder blocks are compiled (``compilation.py``)

Families whose attention does more than these kernels compute get one that computes it: soft caps (Gemma 2) and sinks (gpt-oss) need
``eager`` instead of sdpa or flash, chunks (Llama 4) need sdpa instead of flash.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import shutil
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward

from ft_assets.training.runtime.model import decoder
from ft_assets.training.runtime.run_errors import BadSpec

FLEX, FLASH = "flex_attention", "flash_attention_2"
VARLEN = "varlen"
"""Name under which models know PyTorch's flash kernel; for ``flash_attention_2`` they would look for the flash-attn package."""
KERNEL_KINDS = frozenset(("full_attention", "sliding_attention"))
"""Kinds of layers whose masks PyTorch's flash kernel has."""
BLOCK = 128
"""Tokens per block of flex attention's mask."""
GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""PyTorch before 2.12 accepts fewer heads of keys than of queries without being asked."""


def prepare(attention: str, device: torch.device, *, max_seq_len: int, config: Any) -> str:
    """Makes `attention` available to models and returns their name for it; raises ``BadSpec`` if this machine lacks what it needs.

    `config`: of the model, which may need another implementation (:func:`exact`).
    """
    attention = exact(attention, config)
    if attention not in (FLEX, FLASH):
        return attention
    if device.type == "cpu":
        raise BadSpec(f"{attention} has no kernels for a CPU; use sdpa")
    missing = [name for name, there in (("triton", _importable("triton")), ("a C compiler", _compiler())) if not there]
    if missing:
        raise BadSpec(f"{attention} compiles kernels on first use, but {' and '.join(missing)} is not installed; use sdpa")
    if attention == FLASH:
        AttentionInterface.register(VARLEN, functools.partial(varlen_attention, longest=max_seq_len))
        return VARLEN
    AttentionInterface.register(FLEX, _flex)
    return FLEX


def exact(attention: str, config: Any) -> str:
    """Returns `attention`, or what computes all that a model of `config` does in its attention if `attention` does not."""
    if attention != FLEX and not decoder.model_class(config)._supports_sdpa:
        return "eager"
    kinds = set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())
    return "sdpa" if attention == FLASH and kinds - KERNEL_KINDS else attention


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
    config._attn_implementation = "eager" if own == "eager" else "sdpa"
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
