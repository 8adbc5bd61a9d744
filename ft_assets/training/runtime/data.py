"""The pack as a table: verified against its manifest and checked row by row before a model is loaded.

Needs numpy and pyarrow only, so that a damaged pack is refused within a second of the start.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ft_assets.training.runtime.endings import BadExample, BadInput, BadSpec
from ft_assets.training.spec import TrainingSpec

COLUMNS = ["input_ids", "labels", "seq_lengths"]
MAX_VALIDATION_WINDOWS = 100
"""Bounds a validation pass at a checkpoint to seconds; a standard error under a tenth of the loss's spread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    train: pa.Table
    validation: pa.Table | None


def load(pack_dir: Path, spec: TrainingSpec, *, vocab_size: int) -> Pack:
    """Read and check the pack of `spec`. The whole table lies in memory: 8 bytes a token."""
    try:
        manifest = json.loads((pack_dir / "manifest.json").read_text())
    except (OSError, ValueError) as e:
        raise BadInput(f"{pack_dir / 'manifest.json'} cannot be read ({e}); pack the dataset again") from e
    if manifest["fingerprint"] != spec.pack_fingerprint:
        raise BadSpec(f"{pack_dir} is pack {manifest['fingerprint']}, the spec wants {spec.pack_fingerprint}")
    train = _read_shards(pack_dir, manifest["shards"])
    if not train.num_rows:
        raise BadExample("the pack has no windows: every example was dropped; see the dataset's report")
    _check(train, "train", spec, vocab_size)
    if not pc.any(pc.not_equal(_flat(train, "labels"), -100)).as_py():
        raise BadExample("no token of the pack carries loss: check weights and train_on_inputs")
    validation = None
    if manifest.get("validation"):
        validation = _read_shards(pack_dir, manifest["validation"]["shards"]).slice(0, MAX_VALIDATION_WINDOWS)
        _check(validation, "validation", spec, vocab_size)
    return Pack(train=train, validation=validation if validation is not None and validation.num_rows else None)


def _read_shards(pack_dir: Path, shards: list[dict[str, Any]]) -> pa.Table:
    tables = []
    for shard in shards:
        path = pack_dir / shard["name"]
        try:
            with path.open("rb") as f:
                digest = hashlib.file_digest(f, "sha256").hexdigest()
        except OSError as e:
            raise BadInput(f"{path} cannot be read ({e}); fetch the pack again") from e
        if digest != shard["sha256"]:
            raise BadInput(f"{path} has digest {digest[:12]}, the manifest says {shard['sha256'][:12]}; fetch the pack again")
        tables.append(pq.read_table(path, columns=COLUMNS))
    empty = pa.table({name: pa.array([], pa.list_(pa.int32())) for name in COLUMNS})
    return pa.concat_tables(tables).combine_chunks() if tables else empty


def _check(table: pa.Table, split: str, spec: TrainingSpec, vocab_size: int) -> None:
    """Refuse the first row that would train on garbage or crash a kernel, by its number."""
    lengths = _lengths(table, "input_ids")
    sums = np.zeros(table.num_rows, dtype=np.int64)
    np.add.at(sums, np.repeat(np.arange(table.num_rows), _lengths(table, "seq_lengths")), _flat(table, "seq_lengths").to_numpy())
    for bad, why in (
        (lengths == 0, "is empty"),
        (lengths > spec.max_seq_len, f"is longer than max_seq_len {spec.max_seq_len}"),
        (lengths != _lengths(table, "labels"), "has not as many labels as tokens"),
        (lengths != sums, "has seq_lengths that do not add up to its tokens"),
    ):
        if bad.any():
            raise BadExample(f"{split} window {int(bad.argmax())} {why}", split=split, row=int(bad.argmax()))
    ids = _flat(table, "input_ids").to_numpy()
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        at = int(outside.argmax())
        row = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
        raise BadExample(f"{split} window {row} holds token {int(ids[at])}, the vocabulary ends at {vocab_size - 1}", split=split, row=row)


def _lengths(table: pa.Table, column: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    lengths: np.ndarray[Any, np.dtype[np.int64]] = pc.list_value_length(table[column]).to_numpy().astype(np.int64)
    return lengths


def _flat(table: pa.Table, column: str) -> pa.ChunkedArray:
    return pc.list_flatten(table[column])
