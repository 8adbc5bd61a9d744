"""Attention over packed windows: the implementation for each value of the spec, and its requirements on a batch.

sdpa               exact everywhere. Packed windows need a mask of tokens x tokens, for which PyTorch has no flash kernel
flex_attention     GPUs: skips the empty blocks of the mask. Compiled for one shape, so windows are padded to one length
flash_attention_2  GPUs with the flash-attn package: windows of a micro-batch are joined to one row
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward

from ft_assets.training.runtime.run_errors import BadSpec

FLEX = "flex_attention"
BLOCK = 128
"""Tokens per block of its mask."""


def prepare(attention: str, device: torch.device) -> None:
    """Makes `attention` available to models; raises ``BadSpec`` if this machine lacks what it needs."""
    if attention != FLEX:
        return
    if device.type == "cpu":
        raise BadSpec("flex_attention has no backward pass on a CPU; use sdpa")
    missing = [name for name, there in (("triton", _importable("triton")), ("a C compiler", _compiler())) if not there]
    if missing:
        raise BadSpec(f"flex_attention is compiled on first use, but {' and '.join(missing)} is not installed; use sdpa")
    AttentionInterface.register(FLEX, _flex)


def window_length(attention: str, max_seq_len: int) -> int | None:
    """Returns the length to which every window is padded; None: the longest of its micro-batch."""
    return -(-max_seq_len // BLOCK) * BLOCK if attention == FLEX else None


@contextlib.contextmanager
def without_compiling(model: Any) -> Iterator[None]:
    """Uses sdpa for sequences of many lengths, each of which would have to be compiled."""
    config = model.config
    if config._attn_implementation != FLEX:
        yield
        return
    config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        config._attn_implementation = FLEX


def _flex(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any) -> Any:
    """Autocast handles sdpa but not this: rotary positions give float32 queries and keys beside half-precision values."""
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return flex_attention_forward(module, query, key, value, attention_mask, **options)


def _importable(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _compiler() -> bool:
    return any(shutil.which(name) for name in ("cc", "gcc", "clang"))
