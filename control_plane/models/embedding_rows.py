"""Rows of a model's embedding and output layer, on disk: counted, appended, set to the mean; every other byte is copied.

A new row is the mean of the rows of existing tokens. In the output layer its logit is the mean of theirs, so its probability is at most
that of the average token, and old answers hardly change (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models").
Needs no torch; memory holds a few chunks (:data:`CHUNK_BYTES`), whatever the size of the model.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from core.base_models import model_config, text_config, ties_embeddings, weight_files
from core.errors import InvalidRequest
from engine.adapters import FLOAT_TYPES, ITEM_BYTES, TensorInfo, tensor_header

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
"""Ends of the names of the two tensors with a row per token id, in every family that is supported."""
ALIGNED = 64
"""Rows stay a multiple of the largest power of two up to this that divides those of the base: matrix units compute such sizes fastest."""
CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Which rows change. The tables have `old` rows and get `new`; rows from `first` up to `end` (exclusive) become the mean of those
    before `first`."""

    old: int
    new: int
    first: int
    end: int


def plan(directory: Path, *, first_id: int, num_tokens: int) -> Rows:
    """Returns where the rows of `num_tokens` tokens go, whose ids start at `first_id`.

    Padding rows behind the tokenizer's last id are used first. ``InvalidRequest`` (``model_not_extendable``) if the model has other tensors
    with a row per token than an embedding and an output layer of floats.
    """
    old, needed = _count(directory), first_id + num_tokens
    if needed <= old:
        return Rows(old=old, new=old, first=first_id, end=needed)
    step = math.gcd(old, ALIGNED)
    new = -(-needed // step) * step
    return Rows(old=old, new=new, first=min(first_id, old), end=new)


def _count(directory: Path) -> int:
    config = model_config(directory)
    count = int(text_config(config).get("vocab_size") or 0)
    found = {name: info for file in weight_files(directory) for name, info in tensor_header(file).items()}
    tables = {name: info for name, info in found.items() if _is_table(name)}
    ends = sorted(EMBEDDING if name.endswith(EMBEDDING) else HEAD for name in tables)
    others = [name for name, info in found.items() if info.shape[:1] == (count,) and name not in tables]
    wrong = [name for name, info in tables.items() if len(info.shape) != 2 or info.shape[0] != count or info.dtype not in FLOAT_TYPES]
    if wrong or others:
        odd = (wrong or others)[0]
        raise _not_extendable(directory, f"tensor {odd} ({found[odd].dtype}, shape {list(found[odd].shape)}) for {count} token ids")
    if ends != [EMBEDDING, HEAD] and (ends != [EMBEDDING] or not ties_embeddings(config)):
        raise _not_extendable(directory, f"{ends.count(EMBEDDING)} tensors *{EMBEDDING} and {ends.count(HEAD)} *{HEAD}")
    return count


def _is_table(name: str) -> bool:
    return f".{name}".endswith((f".{EMBEDDING}", f".{HEAD}"))


def _not_extendable(directory: Path, what: str) -> InvalidRequest:
    return InvalidRequest(
        f"the model in {directory} has {what}; rows are added to one embedding (*{EMBEDDING}) and one output layer (*{HEAD}) of floats "
        "alone: add the tokens with the tools of the model's author, then `ft admin models add ID --path DIR`",
        code="model_not_extendable",
    )


def extended_config(config: Mapping[str, Any], rows: Rows) -> dict[str, Any]:
    """Returns a ``config.json`` with the new number of rows, in the text decoder's part and wherever the old number stands for it."""
    changed = dict(config)
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        changed["text_config"] = {**nested, "vocab_size": rows.new}
    if not isinstance(nested, Mapping) or config.get("vocab_size") == rows.old:
        changed["vocab_size"] = rows.new
    return changed


def extended_index(index: Mapping[str, Any], *, num_bytes: int, num_parameters: int) -> dict[str, Any]:
    """Returns a ``model.safetensors.index.json`` whose totals include what was added."""
    totals = dict(index.get("metadata") or {})
    added = {"total_size": num_bytes, "total_parameters": num_parameters}
    return {**index, "metadata": totals | {name: totals[name] + number for name, number in added.items() if name in totals}}


def added_to(directory: Path, rows: Rows) -> tuple[int, int]:
    """Returns the bytes and the parameters that the weights grow by."""
    infos = [info for file in weight_files(directory) for name, info in tensor_header(file).items() if _is_table(name)]
    parameters = [(rows.new - rows.old) * info.shape[1] for info in infos]
    return sum(n * ITEM_BYTES[info.dtype] for n, info in zip(parameters, infos, strict=True)), sum(parameters)


def copy_shard(source: Path, target: Path, rows: Rows) -> None:
    """Writes `source`, a safetensors file, to `target` with the rows of its embedding and output layer, if it holds any."""
    found = tensor_header(source)
    if not any(map(_is_table, found)):
        shutil.copyfile(source, target)
        return
    ordered = sorted(found, key=lambda name: (found[name].start, found[name].end))
    with source.open("rb") as stored, target.open("wb") as out:
        metadata = json.loads(stored.read(int.from_bytes(stored.read(8), "little"))).get("__metadata__")
        entries: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
        at = 0
        for name in ordered:
            info = found[name]
            shape, size = info.shape, info.end - info.start
            if _is_table(name):
                shape, size = (rows.new, shape[1]), size // rows.old * rows.new
            entries[name] = {"dtype": info.dtype, "shape": list(shape), "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        out.write(len(text).to_bytes(8, "little") + text)
        for name in ordered:
            if _is_table(name):
                _write_table(stored, out, found[name], rows)
            else:
                _copy(stored, out, found[name].start, found[name].end)


def _write_table(stored: IO[bytes], out: IO[bytes], info: TensorInfo, rows: Rows) -> None:
    row_bytes = (info.end - info.start) // rows.old
    _copy(stored, out, info.start, info.start + rows.first * row_bytes)
    row = _mean_row(stored, info, rows.first)
    for _ in range(rows.first, rows.end):
        out.write(row)
    _copy(stored, out, min(info.start + rows.end * row_bytes, info.end), info.end)


def _copy(stored: IO[bytes], out: IO[bytes], start: int, end: int) -> None:
    stored.seek(start)
    while start < end:
        part = stored.read(min(CHUNK_BYTES, end - start))
        out.write(part)
        start += len(part)


def _mean_row(stored: IO[bytes], info: TensorInfo, num_rows: int) -> bytes:
    """Returns the mean of the first `num_rows` rows in the tensor's own type, summed in float64 and in order."""
    width, item = info.shape[1], ITEM_BYTES[info.dtype]
    at_once = max(1, CHUNK_BYTES // (8 * width))
    total = np.zeros(width, dtype=np.float64)
    stored.seek(info.start)
    for at in range(0, num_rows, at_once):
        part = stored.read(min(at_once, num_rows - at) * width * item)
        total += _as_floats(part, info.dtype).reshape(-1, width).sum(axis=0, dtype=np.float64)
    return _as_stored(total / num_rows, info.dtype)


def _as_floats(raw: bytes, dtype: str) -> NDArray[Any]:
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(raw, "<f4" if dtype == "F32" else "<f2")


def _as_stored(values: NDArray[np.float64], dtype: str) -> bytes:
    if dtype != "BF16":
        return bytes(values.astype("<f4" if dtype == "F32" else "<f2"))
    bits = values.astype("<f4").view("<u4")
    return bytes(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2"))  # to the nearest, ties to even
