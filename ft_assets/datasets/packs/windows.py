"""Fills windows with the examples of token shards and writes them as Parquet."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ft_assets.datasets.durable import write_durable
from ft_assets.datasets.histogram import histogram
from ft_assets.datasets.packs.packing import best_fit_decreasing, fill
from ft_assets.datasets.tokens.chat_tokenizer import IGNORE
from ft_assets.datasets.tokens.token_shards import TokenShard

SCHEMA = pa.schema([(name, pa.list_(pa.int32())) for name in ("input_ids", "labels", "seq_lengths")])
SHARD_TOKENS = 1 << 24
"""Room of the windows in one Parquet shard: 16.8M tokens are about 24 MB on disk and 200 MB while being written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartManifest:
    """Counts and files of the training or the validation part."""

    num_examples: int
    num_windows: int
    num_tokens: int
    num_trained_tokens: int
    fill: float
    shards: list[dict[str, Any]]
    lengths: dict[str, list[int]]
    rows: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """The fields that a pack's manifest holds for each part."""
        names = ("num_examples", "num_windows", "num_tokens", "num_trained_tokens", "fill", "shards")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class _Examples:
    """Random access to the examples of several token shards, mapped from disk."""

    ids: list[NDArray[np.int32]]
    loss: list[NDArray[np.bool_]]
    shard: NDArray[np.int32]
    start: NDArray[np.int64]
    lengths: NDArray[np.int32]
    rows: NDArray[np.int64]

    def window(self, indexes: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """(input_ids, labels) of the examples one after the other."""
        places = [(int(self.shard[i]), slice(int(self.start[i]), int(self.start[i]) + int(self.lengths[i]))) for i in indexes]
        ids = np.concatenate([self.ids[shard][where] for shard, where in places])
        loss = np.concatenate([self.loss[shard][where] for shard, where in places])
        return ids, np.where(loss, ids, np.int32(IGNORE)).astype(np.int32)


def write_windows(
    shards: Sequence[TokenShard], out_dir: Path, *, part: Literal["train", "validation"], capacity: int, pack: bool, key: str
) -> PartManifest:
    """Pack the examples of `shards` into windows of `capacity` and write them below `out_dir`.

    The order of windows is a permutation that depends on `key` and the contents' order only: files are often sorted by class, and
    best-fit decreasing sorts by length.
    """
    examples = _load(shards)
    windows = best_fit_decreasing(examples.lengths, capacity) if pack else [[i] for i in range(len(examples.lengths))]
    for window in windows:
        window.sort()
    windows.sort(key=lambda w: hashlib.blake2b(f"{key}:{w[0]}".encode(), digest_size=8).digest())
    prefix = "shard" if part == "train" else "val"
    files, num_trained = [], 0
    for number, group in enumerate(_groups(windows, capacity)):
        entry, trained = _write_shard(out_dir / f"{prefix}-{number:05d}.parquet", group, examples)
        files.append(entry)
        num_trained += trained
    num_tokens = int(examples.lengths.sum())
    rows = _write_rows(out_dir / "rows.parquet", windows, examples) if part == "train" else {}
    return PartManifest(
        num_examples=len(examples.lengths),
        num_windows=len(windows),
        num_tokens=num_tokens,
        num_trained_tokens=num_trained,
        fill=round(fill(num_tokens, len(windows), capacity), 6),
        shards=files,
        lengths=histogram(examples.lengths),
        rows=rows,
    )


def _load(shards: Sequence[TokenShard]) -> _Examples:
    lengths = [s.array("lengths") for s in shards]
    return _Examples(
        ids=[s.array("ids") for s in shards],
        loss=[s.array("loss") for s in shards],
        shard=np.repeat(np.arange(len(shards), dtype=np.int32), [len(n) for n in lengths]),
        start=np.concatenate([np.cumsum(n, dtype=np.int64) - n for n in lengths]),
        lengths=np.concatenate(lengths),
        rows=np.concatenate([s.array("rows") for s in shards]),
    )


def _groups(windows: Sequence[list[int]], capacity: int) -> Iterator[Sequence[list[int]]]:
    """Windows of one Parquet shard each."""
    size = max(1, SHARD_TOKENS // capacity)
    return (windows[i : i + size] for i in range(0, len(windows), size))


def _write_shard(path: Path, windows: Sequence[list[int]], examples: _Examples) -> tuple[dict[str, Any], int]:
    """(manifest entry, trained tokens) of the shard written at `path`."""
    built = [examples.window(w) for w in windows]
    lengths = [examples.lengths[w].astype(np.int32) for w in windows]
    columns = [_lists([ids for ids, _ in built]), _lists([labels for _, labels in built]), _lists(lengths)]
    trained = sum(int(np.count_nonzero(labels != IGNORE)) for _, labels in built)
    _write_table(path, pa.table(columns, schema=SCHEMA))
    return {"name": path.name, "sha256": _sha256(path), "num_windows": len(windows)}, trained


def _write_rows(path: Path, windows: Sequence[list[int]], examples: _Examples) -> dict[str, str]:
    column = _lists([examples.rows[w] for w in windows])
    _write_table(path, pa.table([column], names=["rows"]))
    return {"name": path.name, "sha256": _sha256(path)}


def _lists(arrays: Sequence[NDArray[Any]]) -> pa.ListArray:
    offsets = np.concatenate(([0], np.cumsum([len(a) for a in arrays]))).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(arrays)))


def _write_table(path: Path, table: pa.Table) -> None:
    partial = path.with_name(f".{path.name}.tmp")
    with partial.open("wb") as stream:
        pq.write_table(table, stream, compression="zstd", compression_level=1, use_dictionary=False, store_schema=False)
        write_durable(stream)
    partial.replace(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
