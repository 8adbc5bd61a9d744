"""Reads safetensors files without torch: names, shapes, and whether every number is finite (bfloat16 included); writes them one tensor at a
time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from core.errors import IntegrityError
from core.typed_json import JsonObject

MAX_HEADER_BYTES = 100_000_000
"""Limit of the format itself."""
CHUNK = 1 << 22
"""Values examined at once: limits memory, whatever the size of a tensor."""
FLOAT_TYPES = ("F32", "F16", "BF16")
"""Types that servers accept for an adapter's weights."""
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1,
              "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}  # fmt: skip
"""Types whose tensors have as many bytes as their shape implies."""
LARGEST = 65504.0
"""The largest number of half precision, which servers may cast an adapter to."""
EXPONENT = {"F64": ("<u8", 0x7FF0_0000_0000_0000), "F32": ("<u4", 0x7F80_0000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
"""Integer view of a float type, and its exponent bits: all of them set means infinity or NaN."""
BEYOND = {"F64": 0x40EF_FC00_0000_0000, "F32": 0x477F_E000, "BF16": 0x477F}
"""Bits of :data:`LARGEST` (in BF16 of the next number below)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    """Byte range in the file."""


def tensor_header(path: Path) -> dict[str, TensorInfo]:
    """Returns the tensors of a safetensors file by name; ``IntegrityError`` if it is not one, or torn."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
            raise IntegrityError(f"{path.name} is not a safetensors file, or is cut off: {size} bytes, header of {length}")
        try:
            raw = json.loads(file.read(length))
            entries = {k: v for k, v in raw.items() if k != "__metadata__"}
            tensors = {k: _info(v, offset=8 + length) for k, v in entries.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            raise IntegrityError(f"{path.name} has a broken safetensors header: {e}") from e
    if any(t.end > size or t.start > t.end for t in tensors.values()):
        raise IntegrityError(f"{path.name} is truncated: its header describes more than the file's {size} bytes")
    _check_ranges(path.name, tensors, first=8 + length, size=size)
    return tensors


def _check_ranges(name: str, tensors: dict[str, TensorInfo], *, first: int, size: int) -> None:
    """Checks the format's own rule: tensors are contiguous and fill the file, each as long as its type and shape require."""
    at = first
    for key, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start != at:
            raise IntegrityError(f"{name}: tensor {key[:160]} starts at byte {info.start}, the one before it ends at {at}")
        item = ITEM_BYTES.get(info.dtype)
        if item is not None and math.prod(info.shape) * item != info.end - info.start:
            raise IntegrityError(f"{name}: tensor {key[:160]} has {info.end - info.start} bytes, not those of {info.dtype} {info.shape}")
        at = info.end
    if at != size:
        raise IntegrityError(f"{name} has {size} bytes, and its tensors end at {at}")


def _info(entry: JsonObject, *, offset: int) -> TensorInfo:
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(n) is int and n >= 0 for n in (start, end, *shape)):
        raise ValueError("a shape or an offset is not a whole number")
    return TensorInfo(dtype=str(entry["dtype"]), shape=shape, start=offset + start, end=offset + end)


def write(path: Path, contents: Mapping[str, tuple[str, tuple[int, ...]]], read: Callable[[str], memoryview]) -> None:
    """Writes a safetensors file; `contents` gives type and shape of each tensor, `read` its bytes, and one tensor at a time is in memory.

    Wider types come first, as the format's own library orders them, so that every tensor starts at a multiple of its item's size.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ordered, at = sorted(contents, key=lambda name: (-ITEM_BYTES[contents[name][0]], name)), 0
    for name in ordered:
        dtype, shape = contents[name]
        end = at + math.prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in ordered:
            file.write(read(name))


def not_finite(path: Path, tensors: dict[str, TensorInfo]) -> Iterator[str]:
    """Returns the names of tensors that contain an infinity or a NaN."""
    for name, info in tensors.items():
        if info.dtype in EXPONENT and _largest_bits(path, info) >= EXPONENT[info.dtype][1]:
            yield name


def too_large(path: Path, tensors: dict[str, TensorInfo]) -> Iterator[str]:
    """Returns the names of tensors with a number beyond :data:`LARGEST`."""
    for name, info in tensors.items():
        if info.dtype in BEYOND and _largest_bits(path, info) > BEYOND[info.dtype]:
            yield name


def _largest_bits(path: Path, info: TensorInfo) -> int:
    """Returns the largest magnitude as its bits without the sign: floats of one sign sort like the integers of their bits, NaN above
    infinity."""
    dtype, _ = EXPONENT[info.dtype]
    item = np.dtype(dtype).itemsize
    unsigned = np.array((1 << (8 * item - 1)) - 1, dtype=dtype)
    count, largest = (info.end - info.start) // item, 0
    for at in range(0, count, CHUNK):
        chunk = np.fromfile(path, dtype=dtype, count=min(CHUNK, count - at), offset=info.start + at * item)
        largest = max(largest, int((chunk & unsigned).max(initial=0)))
    return largest


NESTED_FIRST = frozenset(("gemma3", "mistral3"))
"""Model types whose checkpoints put the part of a tensor's name that says ``language_model`` before the one that says ``model``."""
PREFIXES = (
    ("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head."), ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)  # fmt: skip
"""Beginnings of names in those checkpoints, and of the modules' names in transformers, which adapters and servers use."""


def module_name(stored: str, model_type: str) -> str:
    """Returns the name under which transformers knows the tensor called `stored` in a checkpoint."""
    if model_type in NESTED_FIRST:
        for prefix, module in PREFIXES:
            if stored.startswith(prefix):
                return module + stored.removeprefix(prefix)
    return stored


def module_shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a model's weights by their modules' names."""
    model_type = str(json.loads((model_dir / "config.json").read_text(encoding="utf-8")).get("model_type", ""))
    return {module_name(name, model_type): shape for name, shape in weight_shapes(model_dir).items()}


def weight_shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a model's weights by name, over all of its safetensors shards."""
    shards = sorted(model_dir.glob("*.safetensors"))
    if not shards:
        raise IntegrityError(f"base model {model_dir} has no safetensors weights")
    return {name: info.shape for shard in shards for name, info in tensor_header(shard).items()}
