"""``rows.parquet``: the good rows of a dataset in the internal form, written once, read as a stream."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from core.durable_files import write_durable
from engine.data.schema import Example, parse_canonical
from engine.data.split import Part

SCHEMA = pa.schema([("row", pa.int64()), ("split_key", pa.string()), ("part", pa.string()), ("example", pa.string())])
BATCH = 2048
"""Rows held at once when reading."""
PART_NAMES: tuple[Part | None, ...] = (None, "train", "validation")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRow:
    row: int
    """Row number in the uploaded file."""
    split_key: str
    """Hex digits, equal for duplicates and near duplicates: key of an automatic split."""
    part: Part | None
    """Part by the dataset's own split; None: it has none."""
    example: Example


def load_stored(path: Path) -> Iterator[StoredRow]:
    """Yields the rows of a ``rows.parquet`` in order, in bounded memory."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=BATCH):
            columns = batch.to_pydict()
            for row, key, part, example in zip(*(columns[name] for name in SCHEMA.names), strict=True):
                yield StoredRow(row=row, split_key=key, part=part, example=parse_canonical(example, row=row))


def load_rows(path: Path) -> Iterator[Example]:
    """Yields the examples of a ``rows.parquet`` in order."""
    return (stored.example for stored in load_stored(path))


def content_digest(path: Path) -> str:
    """Recomputes the dataset's content sha256 from its stored rows: over the sha256 of each row's canonical form, in order."""
    digest = hashlib.sha256()
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=BATCH, columns=["example"]):
            for example in batch.column(0).to_pylist():
                digest.update(hashlib.sha256(example.encode("utf-8", "surrogatepass")).digest())
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsBlock:
    """Rows to write; canonical form i is ``data[offsets[i]:offsets[i + 1]]``."""

    rows: NDArray[np.int64]
    split_keys: list[str]
    parts: NDArray[np.uint8]
    """Index into :data:`PART_NAMES`."""
    offsets: NDArray[np.int64]
    data: NDArray[np.uint8]
    keep: NDArray[np.bool_]
    """False for omitted rows."""


class RowsWriter:
    """Writes rows beside `output`, a block at a time; :meth:`close` renames the complete file or removes it."""

    def __init__(self, output: Path) -> None:
        output.parent.mkdir(parents=True, exist_ok=True)
        self._output = output
        self._partial = output.with_name(f".{output.name}.{os.getpid()}.tmp")
        self._writer = pq.ParquetWriter(self._partial, SCHEMA, compression="zstd", compression_level=1, use_dictionary=["part"])

    def add(self, block: RowsBlock) -> None:
        """Writes the kept rows of one block."""
        buffers = [None, pa.py_buffer(block.offsets), pa.py_buffer(block.data)]
        examples = pa.Array.from_buffers(pa.large_string(), len(block.rows), buffers)
        parts = pa.array([PART_NAMES[p] for p in block.parts.tolist()], pa.string())
        table = pa.table([pa.array(block.rows), pa.array(block.split_keys), parts, examples], names=SCHEMA.names)
        if not block.keep.all():
            table = table.filter(pa.array(block.keep))
        if table.num_rows:
            self._writer.write_table(table.cast(SCHEMA))

    def close(self, *, keep: bool) -> None:
        """Renames to `output` if `keep`, otherwise removes the file."""
        self._writer.close()
        if not keep:
            self._partial.unlink()
            return
        with self._partial.open("rb") as stream:
            write_durable(stream)
        self._partial.replace(self._output)
