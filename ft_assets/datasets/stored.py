"""``rows.parquet``: the good rows of a dataset in the internal form, written once, read as a stream."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ft_assets.datasets.schema import Example, parse_canonical

SCHEMA = pa.schema([("row", pa.int64()), ("kind", pa.string()), ("content_sha256", pa.string()), ("example", pa.string())])
BATCH = 2048
"""Rows held at once when writing and reading."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRow:
    row: int
    """Of the uploaded file."""
    content_sha256: str
    """Of the normalised text: equal for duplicates, and what the split goes by."""
    example: Example


def load_stored(path: Path) -> Iterator[StoredRow]:
    """The rows of a ``rows.parquet`` in order, in bounded memory."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=BATCH):
            columns = batch.to_pydict()
            for row, sha, example in zip(columns["row"], columns["content_sha256"], columns["example"], strict=True):
                yield StoredRow(row=row, content_sha256=sha, example=parse_canonical(example, row=row))


def load_rows(path: Path) -> Iterator[Example]:
    """The examples of a ``rows.parquet`` in order."""
    return (stored.example for stored in load_stored(path))


class RowsWriter:
    """Writes rows beside `output`, in batches; :meth:`close` makes them appear whole or not at all."""

    def __init__(self, output: Path) -> None:
        output.parent.mkdir(parents=True, exist_ok=True)
        self._output = output
        self._partial = output.with_name(f".{output.name}.{os.getpid()}.tmp")
        self._writer = pq.ParquetWriter(self._partial, SCHEMA, compression="zstd", compression_level=1, use_dictionary=["kind"])
        self._rows: list[tuple[int, str, str, str]] = []

    def add(self, example: Example, content_sha256: str, canonical: bytes) -> None:
        self._rows.append((example.row, example.kind, content_sha256, canonical.decode()))
        if len(self._rows) >= BATCH:
            self._write()

    def _write(self) -> None:
        columns = zip(*self._rows, strict=True)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
        self._writer.write_table(pa.table(arrays, schema=SCHEMA))
        self._rows = []

    def close(self, *, keep: bool) -> None:
        """Rename to `output` if `keep`, else leave no trace."""
        if self._rows:
            self._write()
        self._writer.close()
        if not keep:
            self._partial.unlink()
            return
        with self._partial.open("rb") as stream:
            os.fsync(stream.fileno())
        self._partial.replace(self._output)
