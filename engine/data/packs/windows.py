"""Fills windows with the examples of token shards and writes them as Parquet."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from core.durable_files import sha256_of, write_durable
from engine.data.packs.best_fit import Windows, mixed_fit, one_each, window_for
from engine.data.packs.pack_settings import PackSettings
from engine.data.packs.source import MAX_SHARDS
from engine.data.report.histogram import histogram
from engine.data.split import Part, mixed_bits
from engine.data.tokens.loss_mask import IGNORE
from engine.data.tokens.token_shards import TokenShard

SCHEMA = pa.schema([(name, pa.list_(pa.int32())) for name in ("input_ids", "labels", "seq_lengths")])


@dataclass(frozen=True, kw_only=True, slots=True)
class PartManifest:
    """Counts and files of the training or the validation part."""

    num_examples: int
    num_windows: int
    num_tokens: int
    num_trained_tokens: int
    fill: float
    shards: Sequence[Mapping[str, Any]]
    lengths: dict[str, list[int]]
    rows: dict[str, str]
    num_desirable: int | None = None
    num_undesirable: int | None = None

    def to_dict(self) -> Mapping[str, Any]:
        """Returns the fields that a pack's manifest holds for each part."""
        return {name: value for name, value in asdict(self).items() if name not in ("lengths", "rows")}


Written = Callable[[int, int], None]
"""Callback with the examples and tokens written after each file."""


def write_windows(
    shards: Sequence[TokenShard], out_dir: Path, *, part: Part, settings: PackSettings, window: int, key: str, threads: int = 1,
    written: Written,
) -> PartManifest:  # fmt: skip
    """Packs the examples of `shards` into windows of `window` tokens and writes them below `out_dir`.

    What shares a window and the order of windows depend only on `key` and the order of the contents: files are often sorted by class.
    """
    examples = _Examples(shards)
    windows = mixed_fit(examples.lengths, window, seed=f"{key}/windows") if settings.packing else one_each(len(examples.lengths))
    windows = windows.rearranged(_permutation(windows, key))
    size = max(1, settings.file_tokens // settings.max_seq_len)
    prefix = "shard" if part == "train" else "val"
    starts = range(0, len(windows), size)
    files: list[Mapping[str, Any]] = []
    num_trained = num_examples = num_tokens = 0

    def write(number: int) -> _File:
        cut = Windows(order=windows.order, offsets=windows.offsets[starts[number] : starts[number] + size + 1])
        return _write_shard(out_dir / f"{prefix}-{number:05d}.parquet", cut, examples)

    with ThreadPoolExecutor(threads) as pool:
        for file in pool.map(write, range(len(starts))):
            files.append(file.entry)
            num_trained, num_examples, num_tokens = (
                num_trained + file.num_trained,
                num_examples + file.num_examples,
                num_tokens + file.num_tokens,
            )
            written(num_examples, num_tokens)
    return PartManifest(
        num_examples=num_examples,
        num_windows=len(windows),
        num_tokens=num_tokens,
        num_trained_tokens=num_trained,
        fill=round(num_tokens / windows.room(examples.lengths, window), 6),
        shards=files,
        lengths=histogram(examples.lengths),
        rows=_write_rows(out_dir / "rows.parquet", windows, examples) if part == "train" else {},
    )


def choose_window(shards: Sequence[TokenShard], settings: PackSettings) -> int:
    """Returns the tokens of a window: `settings.max_seq_len`, or less if `settings.min_windows` needs it."""
    if not shards or not settings.packing or not settings.min_windows:
        return settings.max_seq_len
    lengths = np.concatenate([np.asarray(s.array("lengths")) for s in shards])
    return window_for(lengths, longest=settings.max_seq_len, min_windows=settings.min_windows)


def longest_example(shards: Sequence[TokenShard]) -> int:
    return max((int(np.asarray(s.array("lengths")).max(initial=0)) for s in shards), default=0)


class _Examples:
    """The examples of several token shards: lengths and rows in memory, tokens mapped from disk."""

    def __init__(self, shards: Sequence[TokenShard]) -> None:
        lengths = [np.asarray(s.array("lengths")) for s in shards]
        self.lengths: NDArray[np.int32] = np.concatenate(lengths)
        self.rows: NDArray[np.int64] = np.concatenate([np.asarray(s.array("rows")) for s in shards])
        self._starts: NDArray[np.int64] = np.concatenate([np.cumsum(n, dtype=np.int64) - n for n in lengths])
        self._first = np.cumsum([0, *(len(n) for n in lengths)])
        """Index of the first example of each shard, and the total after the last."""
        self._shards = shards
        self._tokens = [self._open(s) for s in shards] if len(shards) <= MAX_SHARDS else None

    def _open(self, shard: TokenShard) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        return np.asarray(shard.array("ids")), np.asarray(shard.array("loss"))

    def gather(self, members: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
        """Returns (input_ids, labels) of `members` concatenated, and the number of labels that are not -100."""
        from engine.data.packs.kernels_windows import gather

        lengths = self.lengths[members]
        targets = np.cumsum(lengths, dtype=np.int64) - lengths
        ids, labels = np.empty((2, int(lengths.sum(dtype=np.int64))), np.int32)
        by_place = np.argsort(members)
        bounds = np.searchsorted(members[by_place], self._first)
        trained = 0
        for shard, (low, high) in enumerate(pairwise(bounds.tolist())):
            if low < high:
                chosen = by_place[low:high]
                source = self._tokens[shard] if self._tokens else self._open(self._shards[shard])
                trained += gather(*source, self._starts[members[chosen]], lengths[chosen], targets[chosen], IGNORE, ids, labels)
        return ids, labels, int(trained)


def _permutation(windows: Windows, key: str) -> NDArray[np.int64]:
    """Returns an order of windows determined by `key`: sorted by a hash of each window's first example."""
    x = windows.order[windows.offsets[:-1]].astype(np.uint64)
    x ^= np.uint64(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big"))
    return np.argsort(mixed_bits(x), kind="stable").astype(np.int64)


@dataclass(frozen=True, slots=True)
class _File:
    entry: Mapping[str, Any]
    num_examples: int
    num_tokens: int
    num_trained: int


def _write_shard(path: Path, windows: Windows, examples: _Examples) -> _File:
    """Writes the windows that the offsets of `windows` name."""
    members = windows.order[windows.offsets[0] : windows.offsets[-1]]
    ids, labels, trained = examples.gather(members)
    lengths = examples.lengths[members]
    of_examples = windows.offsets - windows.offsets[0]
    of_tokens = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))[of_examples]
    columns = [_lists(ids, of_tokens), _lists(labels, of_tokens), _lists(lengths, of_examples)]
    write_table(path, pa.table(columns, schema=SCHEMA))
    entry = {"name": path.name, "sha256": sha256_of(path), "num_windows": len(windows)}
    return _File(entry, len(members), len(ids), trained)


def _write_rows(path: Path, windows: Windows, examples: _Examples) -> dict[str, str]:
    column = pa.LargeListArray.from_arrays(pa.array(windows.offsets), pa.array(examples.rows[windows.order]))
    write_table(path, pa.table([column], names=["rows"]))
    return {"name": path.name, "sha256": sha256_of(path)}


def _lists(values: NDArray[Any], offsets: NDArray[np.int64]) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))


def write_table(path: Path, table: pa.Table) -> None:
    """Writes `table` atomically and durably."""
    partial = path.with_name(f".{path.name}.tmp")
    with partial.open("wb") as stream:
        pq.write_table(table, stream, compression="zstd", compression_level=1, use_dictionary=False, store_schema=False)
        write_durable(stream)
    partial.replace(path)
