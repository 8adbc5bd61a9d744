"""The rows that a pack is built from, as bytes: workers parse what they tokenize, the coordinator only distributes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq

from engine.data.identity import content_hash
from engine.data.packs.pack_settings import PackSettings
from engine.data.packs.safety_mix import safety_examples
from engine.data.schema import Example, canonical, parse_canonical
from engine.data.split import Part, part_of
from engine.data.stored_rows import SCHEMA

READ_ROWS = 2048
"""Rows read from a Parquet file at once."""
MAX_SHARDS = 256
"""Most token shards of a large dataset: each is two open files while windows are filled, and 1,024 is the usual limit."""


class SourceRow(NamedTuple):
    row: int
    """Row number in the uploaded file; negative for mixed-in examples."""
    split_key: str
    own_part: Part | None
    """Part assigned by the dataset's own split."""
    canonical: bytes | str

    def parse(self) -> Example:
        return parse_canonical(self.canonical, row=self.row)


class Batch(NamedTuple):
    """Rows of one token shard."""

    part: Part
    rows: list[SourceRow]


Source = Path | Iterable[Example]
"""The ``rows.parquet`` of a dataset, or examples in memory (each is then split by its own content)."""


def read_source(source: Source) -> Iterator[SourceRow]:
    """Yields the rows of `source` in order, in bounded memory."""
    if not isinstance(source, Path):
        yield from (SourceRow(e.row, content_hash(e), None, canonical(e)) for e in source)
        return
    with pq.ParquetFile(source) as file:
        for batch in file.iter_batches(batch_size=READ_ROWS, columns=SCHEMA.names):
            yield from map(SourceRow, *(batch.column(name).to_pylist() for name in ("row", "split_key", "part", "example")))


def has_own_split(rows_file: Path) -> bool:
    """Returns whether rows of a dataset state that they are for validation."""
    with pq.ParquetFile(rows_file) as file:
        return any("validation" in batch.column(0).to_pylist() for batch in file.iter_batches(columns=["part"]))


def shard_size(source: Source, settings: PackSettings) -> int:
    """Returns examples per token shard: as set, or enough to keep a large dataset under `MAX_SHARDS`."""
    if not isinstance(source, Path):
        return settings.shard_examples
    return max(settings.shard_examples, -(-int(pq.read_metadata(source).num_rows) // MAX_SHARDS))


def batches(source: Source, validation: Source, settings: PackSettings, *, size: int) -> Iterator[Batch]:
    """Yields `source` in batches of one part each, the examples mixed into its training part, then `validation`.

    A row that the dataset's own split assigns stays there; the others are assigned by their split key.
    """
    held: dict[Part, list[SourceRow]] = {"train": [], "validation": []}
    num_train = 0
    for row in read_source(source):
        part = row.own_part or part_of(row.split_key, validation_fraction=settings.validation_fraction, seed=settings.split_seed)
        num_train += part == "train"
        held[part].append(row)
        if len(held[part]) == size:
            yield Batch(part, held[part])
            held[part] = []
    for part, more in (("train", _mixed_in(num_train, settings)), ("validation", read_source(validation))):
        for row in more:
            held[part].append(row)
            if len(held[part]) == size:
                yield Batch(part, held[part])
                held[part] = []
        if held[part]:
            yield Batch(part, held[part])


def _mixed_in(num_train: int, settings: PackSettings) -> Iterator[SourceRow]:
    for example in safety_examples(num_train, share=settings.safety_share, file=settings.safety_file):
        yield SourceRow(example.row, "", "train", canonical(example))
