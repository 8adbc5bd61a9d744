"""Safetensors files read without torch: names, shapes, and whether every number is finite (bfloat16 included)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ft_assets.errors import IntegrityError

MAX_HEADER_BYTES = 100_000_000
"""As the format itself bounds it."""
CHUNK = 1 << 22
"""Values looked at together: bounds memory, whatever the size of a tensor."""
EXPONENT = {"F64": ("<u8", 0x7FF0_0000_0000_0000), "F32": ("<u4", 0x7F80_0000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
"""Integer view of a float type, and its exponent bits: all of them set means infinity or NaN."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    """Byte range in the file."""


def header(path: Path) -> dict[str, TensorInfo]:
    """Tensors of a safetensors file by name; ``IntegrityError`` if it is not one, or torn."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
            raise IntegrityError(f"{path.name} is not a safetensors file, or is cut off: {size} bytes, header of {length}")
        try:
            raw = json.loads(file.read(length))
            entries = {k: v for k, v in raw.items() if k != "__metadata__"}
            tensors = {k: _info(v, offset=8 + length) for k, v in entries.items()}
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise IntegrityError(f"{path.name} has a broken safetensors header: {e}") from e
    if any(t.end > size or t.start > t.end for t in tensors.values()):
        raise IntegrityError(f"{path.name} is cut off: its header speaks of more than its {size} bytes")
    return tensors


def _info(entry: dict[str, object], *, offset: int) -> TensorInfo:
    start, end = entry["data_offsets"]  # type: ignore[misc]
    return TensorInfo(dtype=str(entry["dtype"]), shape=tuple(entry["shape"]), start=offset + start, end=offset + end)  # type: ignore[arg-type,has-type]


def not_finite(path: Path, tensors: dict[str, TensorInfo]) -> Iterator[str]:
    """Names of the tensors that hold an infinity or a NaN."""
    for name, info in tensors.items():
        if info.dtype in EXPONENT and not _is_finite(path, info):
            yield name


def _is_finite(path: Path, info: TensorInfo) -> bool:
    dtype, mask = EXPONENT[info.dtype]
    count = (info.end - info.start) // np.dtype(dtype).itemsize
    for at in range(0, count, CHUNK):
        chunk = np.fromfile(path, dtype=dtype, count=min(CHUNK, count - at), offset=info.start + at * np.dtype(dtype).itemsize)
        bits = np.array(mask, dtype=dtype)
        if bool(((chunk & bits) == bits).any()):
            return False
    return True


def weight_shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's weights by name, over all of its safetensors shards."""
    shards = sorted(model_dir.glob("*.safetensors"))
    if not shards:
        raise IntegrityError(f"base model {model_dir} has no safetensors weights")
    return {name: info.shape for shard in shards for name, info in header(shard).items()}
