"""Rows of CSV and Parquet files as objects of column to value; empty cells are absent."""

from __future__ import annotations

import copy
import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ft_assets.datasets.problems import Problem
from ft_assets.datasets.readers.containers import Meter, refuse
from ft_assets.datasets.readers.json_rows import parse_json
from ft_assets.datasets.readers.rows import MAX_ROW_BYTES, Row, text_problems
from ft_assets.datasets.readers.transcripts import LLAMA_START

STRUCTURED = frozenset(
    (
        "messages",
        "conversations",
        "history",
        "tools",
        "functions",
        "chosen",
        "rejected",
        "input",
        "preferred_output",
        "non_preferred_output",
    )
)
"""Fields whose CSV cell may hold JSON."""
PARQUET_BATCH = 512
"""Rows decoded at once; pages bound the memory below that."""


class _Lines:
    """Decoded lines of a CSV file for ``csv.reader``, counting the bytes it has taken."""

    def __init__(self, chunks: Iterable[bytes], skip: int) -> None:
        self.taken = skip
        self._lines = self._split(chunks, skip)

    def __iter__(self) -> Iterator[str]:
        for raw in self._lines:
            self.taken += len(raw)
            yield raw.decode("utf-8", "surrogateescape")

    @staticmethod
    def _split(chunks: Iterable[bytes], skip: int) -> Iterator[bytes]:
        held = b""
        for chunk in chunks:
            *lines, held = (held + chunk).split(b"\n")
            for line in lines:
                yield line[skip:] + b"\n"
                skip = 0
            if len(held) > MAX_ROW_BYTES:  # passed on in pieces: csv refuses the field by its size
                yield held[skip:]
                held, skip = b"", 0
        if held:
            yield held[skip:]


def csv_rows(chunks: Iterable[bytes], *, delimiter: str, skip: int = 0) -> tuple[list[str], Iterator[Row]]:
    """The header and the records below it; record 1 is the first after the header."""
    csv.field_size_limit(MAX_ROW_BYTES)
    lines = _Lines(chunks, skip)
    records = csv.reader(iter(lines), delimiter=delimiter, strict=True)
    try:
        header = [name.strip() for name in next(records, [])]
    except csv.Error as error:
        raise refuse("invalid_csv", f"the header line cannot be parsed ({error}); its fields are separated by {delimiter!r}") from error
    if len(set(header)) != len(header) or not all(header):
        raise refuse("invalid_csv", f"the header {header[:20]} has an empty or repeated column name; give each column a name of its own")
    if problem := next(text_problems(header), None):
        raise refuse(problem.code, f"the header line {problem.message}; {problem.fix}")
    return header, _csv_records(records, lines, header)


def _csv_records(records: Iterator[list[str]], lines: _Lines, header: list[str]) -> Iterator[Row]:
    number = 0
    while True:
        offset = lines.taken
        try:
            fields = next(records)
        except StopIteration:
            return
        except csv.Error as error:
            number += 1
            fix = "quote fields that hold quotes, separators or line breaks, and double the quotes inside"
            yield Row(number=number, byte_offset=offset, value=Problem(path="", code="invalid_csv", message=str(error), fix=fix))
            continue
        if not fields:
            continue
        number += 1
        yield Row(number=number, byte_offset=offset, value=_record(header, fields))


def _record(header: list[str], fields: list[str]) -> Any | Problem:
    if len(fields) != len(header):
        message = f"{len(fields)} fields, but the header has {len(header)}"
        return Problem(path="", code="column_count", message=message, fix="quote fields that hold the separator")
    return next(text_problems(dict(zip(header, fields, strict=True))), None) or {
        k: v for k, v in zip(header, fields, strict=True) if v != ""
    }


def decode_cells(value: dict[str, Any]) -> dict[str, Any] | Problem:
    """`value` with the JSON inside structured cells parsed; a cell that is no JSON stays text."""
    out = copy.copy(value)  # a mapped row stays one
    for name in STRUCTURED & set(value):
        cell = value[name]
        if isinstance(cell, str) and cell.lstrip()[:1] in ("[", "{") and not LLAMA_START.match(cell):
            parsed = parse_json(cell.strip().encode("utf-8", "surrogatepass"))
            if isinstance(parsed, Problem):
                return Problem(path=name, code=parsed.code, message=parsed.message, fix=parsed.fix)
            out[name] = parsed
    return out


def parquet_rows(path: Path, *, max_bytes: int, meter: Meter | None = None) -> tuple[list[str], Iterator[Row]]:
    """The columns and rows of a Parquet file, a batch at a time."""
    try:
        file = pq.ParquetFile(path)
        meta = file.metadata
        size = sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
        columns = list(file.schema_arrow.names)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise refuse("truncated_container", f"the Parquet file is damaged or ends early ({str(error)[:120]}); export it again") from error
    if size > max_bytes:
        raise refuse("file_too_large", f"the file holds {size} bytes decompressed, more than {max_bytes}; split it into several files")
    if len(set(columns)) != len(columns):
        raise refuse("invalid_csv", f"the columns {columns[:20]} have a repeated name; give each column a name of its own")
    return columns, _parquet_records(file, meter)


def _parquet_records(file: pq.ParquetFile, meter: Meter | None) -> Iterator[Row]:
    number, num_rows = 0, max(1, file.metadata.num_rows)
    try:
        for batch in file.iter_batches(batch_size=PARQUET_BATCH):
            if meter is not None:  # by rows: the file is read in jumps
                meter.consumed = meter.total_bytes * min(num_rows, number + batch.num_rows) // num_rows
            for index in range(batch.num_rows):
                number += 1
                yield Row(number=number, byte_offset=None, value=_parquet_value(batch, index))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise refuse(
            "truncated_container", f"the Parquet file is damaged after row {number} ({str(error)[:120]}); export it again"
        ) from error


def _parquet_value(batch: pa.RecordBatch, index: int) -> Any | Problem:
    try:
        value = {n: v for n, v in zip(batch.schema.names, (c[index].as_py() for c in batch.columns), strict=True) if v is not None}
    except UnicodeDecodeError as error:
        return Problem(
            path="", code="invalid_utf8", message=f"a text holds bytes that are not UTF-8: {error.reason}", fix="write UTF-8 text"
        )
    except (pa.ArrowException, ValueError, OverflowError) as error:
        return Problem(path="", code="wrong_type", message=f"a value cannot be read: {str(error)[:120]}", fix="use text, numbers and lists")
    return next(text_problems(value), None) or value
