"""Rows of Parquet files in bounded memory, although a few bytes of Parquet can stand for gigabytes of repeated values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from engine.data.problems import Problem
from engine.data.readers.containers import Meter, RowLimit, refuse
from engine.data.readers.json_rows import too_long
from engine.data.readers.raw_row import MAX_ROW_BYTES, Row, text_problems
from engine.data.readers.thrift import decode_struct

BATCH_BYTES = 128 << 20
"""Most bytes of text that one batch may decode to if each of its values were as long as the dictionary of its column; twice as much is
used while it grows."""
MIN_BATCH, MAX_BATCH = 16, 256
"""Rows decoded at once; below 16 the cost of a batch is noticeable (measured: 4 rows take twice, 1 row eight times the time of 64)."""
MAX_VALUES = 64 << 20
"""Values of one column of one row group: levels are run-length encoded, so a few bytes can claim any number. 64 Mi make 512 MiB of
numbers; writers start a new row group after a million rows."""
VALUES_FLOOR = 1_000_000
"""Most values of one column in all of its row groups, plus one for each stored byte: a conversation of 10,000 empty messages is one row
of a few bits. Measured with zstd -19: Banking77 as chats has 7.5 bytes per message, and 2.1 with each chat four times in its row."""
MAX_FOOTER_BYTES = 64 << 20
"""Column chunks: 10,000 row groups of 50 columns."""
MAX_PAGE_HEADER_BYTES = 4096
"""Bytes of the header of a dictionary page: three numbers, and no statistics."""
BYTE_ARRAY, DICTIONARY_PAGE, DICTIONARY_ENCODINGS, DELTA_BYTE_ARRAY = 6, 2, (2, 8), 7
DAMAGED = (pa.ArrowException, OSError, ValueError, MemoryError)


@dataclass(frozen=True, slots=True)
class Plan:
    """How to read a file without decoding more than ``BATCH_BYTES`` at once."""

    batch_rows: int
    dictionary_columns: list[str]
    """Columns kept as their dictionary, which is slower: their values, each as long as all of them, would not fit."""


@dataclass(frozen=True, slots=True)
class _Column:
    """What the footer says of one column of one row group."""

    path: str
    is_text: bool
    num_values: int
    num_rows: int
    num_bytes: int
    """Bytes decompressed, but not decoded."""
    shares_prefixes: bool
    """A value may be stored as a prefix of the previous one: each may be as long as all of them."""
    dictionary_at: int | None
    """Offset of its dictionary page."""


def parquet_rows(path: Path, *, max_bytes: int, meter: Meter | None = None) -> tuple[list[str], Iterator[Row]]:
    """The columns and rows of a Parquet file, a batch at a time. Refuses one whose footer claims more rows than its bytes can hold."""
    schema, plan = plan_reading(path, max_bytes=max_bytes)
    return list(schema.names), _records(path, plan, meter)


def plan_reading(path: Path, *, max_bytes: int) -> tuple[pa.Schema, Plan]:
    """Returns the schema of a Parquet file and how to read it in bounded memory. Refuses one that is damaged or too large."""
    try:
        with path.open("rb") as stream:
            size, num_rows, chunks = _footer(stream)
            most = max((c.num_values for c in chunks), default=0)
            stored = stream.seek(0, 2)
            plan = _plan(chunks, stream)
        schema = pq.read_schema(path)
    except (*DAMAGED, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise refuse("truncated_container", f"the Parquet file is damaged or ends early ({str(error)[:120]}); export it again") from error
    if size > max_bytes:
        raise refuse("file_too_large", f"the file holds {size} bytes decompressed, more than {max_bytes}; split it into several files")
    if most > MAX_VALUES:
        raise refuse("file_too_large", f"a row group holds {most} values in one column, more than {MAX_VALUES}; write smaller row groups")
    RowLimit(stored_bytes=stored, is_packed=True, max_bytes=max_bytes).take(num_rows)
    allowed = VALUES_FLOOR + stored
    if (in_column := _longest_column(chunks)) > allowed:
        raise refuse(
            "file_too_large",
            f"a column of the file holds {in_column} values in {stored} stored bytes, more than {allowed}; "
            "remove empty and repeated messages",
        )
    if len(set(schema.names)) != len(schema.names):
        raise refuse("invalid_csv", f"the columns {schema.names[:20]} have a repeated name; give each column a unique name")
    return schema, plan


def _longest_column(chunks: Iterable[_Column]) -> int:
    """Returns the values of the column with most values over all row groups."""
    totals = Counter[str]()
    for chunk in chunks:
        totals[chunk.path] += chunk.num_values
    return max(totals.values(), default=0)


def _footer(stream: BinaryIO) -> tuple[int, int, list[_Column]]:
    """Returns (bytes decompressed, rows, columns of every row group); field numbers as in parquet.thrift."""
    end = stream.seek(0, 2)
    stream.seek(max(0, end - 8))
    tail = stream.read(8)
    length = int.from_bytes(tail[:4], "little")
    if len(tail) < 8 or tail[4:] != b"PAR1" or not 0 < length <= min(end - 12, MAX_FOOTER_BYTES):
        raise ValueError("it has no footer")
    stream.seek(end - 8 - length)
    groups = decode_struct(stream.read(length)).get(4, [])
    columns = []
    for group in groups:
        for chunk in group[1]:
            meta = chunk[3]
            has_dictionary = any(e in DICTIONARY_ENCODINGS for e in meta[2])
            at = meta.get(11) or meta[9]  # some writers omit the position of the dictionary: it comes first
            path = ".".join(part.decode("utf-8", "replace") for part in meta[3])
            prefixes = DELTA_BYTE_ARRAY in meta[2]
            columns.append(
                _Column(path, meta[1] == BYTE_ARRAY, meta[5], max(1, group[3]), max(0, meta[6]), prefixes, at if has_dictionary else None)
            )
    return sum(max(0, group[2]) for group in groups), sum(max(0, group[3]) for group in groups), columns


def _plan(columns: Iterable[_Column], stream: BinaryIO) -> Plan:
    rows, repeated = MAX_BATCH, set()
    for column in columns:
        if not column.is_text:
            continue
        longest = _dictionary_bytes(stream, column.dictionary_at) if column.dictionary_at is not None else 0
        # all values of a nested column may be in one row
        of_row = longest * (max(1, column.num_values) if "." in column.path else 1)
        if BATCH_BYTES // max(1, of_row) < MIN_BATCH:
            repeated.add(column.path)
        else:
            rows = min(rows, BATCH_BYTES // max(1, of_row))
        written = column.num_bytes * max(1, column.num_values) if column.shares_prefixes else column.num_bytes
        rows = min(rows, max(1, BATCH_BYTES // max(1, written // column.num_rows)))
    return Plan(rows, sorted(repeated))


def _dictionary_bytes(stream: BinaryIO, offset: int) -> int:
    """Returns the size of the page at `offset`, decompressed, if it is a dictionary."""
    stream.seek(offset)
    header = decode_struct(stream.read(MAX_PAGE_HEADER_BYTES))
    return int(header[2]) if header[1] == DICTIONARY_PAGE else 0


def _records(path: Path, plan: Plan, meter: Meter | None) -> Iterator[Row]:
    number = 0
    try:
        with pq.ParquetFile(path, read_dictionary=plan.dictionary_columns) as file:
            num_rows = max(1, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=plan.batch_rows):
                if meter is not None:  # by rows: the file is not read sequentially
                    meter.consumed = meter.total_bytes * min(num_rows, number + batch.num_rows) // num_rows
                for value, num_bytes in _values(batch):
                    number += 1
                    yield Row(number=number, byte_offset=None, value=value, num_bytes=num_bytes)
    except DAMAGED as error:
        raise refuse(
            "truncated_container", f"the Parquet file is damaged after row {number} ({str(error)[:120]}); export it again"
        ) from error


def _values(batch: pa.RecordBatch) -> Iterator[tuple[Any, int]]:
    """Returns the rows of `batch` as objects or problems, and about how many bytes each takes; nulls in objects are absent."""
    try:
        num_bytes = decoded_bytes(batch)
        columns = [_cells(column) for column in batch.columns] if num_bytes <= MAX_ROW_BYTES else None
    except (UnicodeDecodeError, pa.ArrowException, ValueError, OverflowError):
        columns = None  # one of the values is invalid: found row by row
    if columns is None:
        yield from (_value(batch.slice(index, 1)) for index in range(batch.num_rows))
        return
    for cells in zip(*columns, strict=True):
        value = {n: v for n, v in zip(batch.schema.names, cells, strict=True) if v is not None}
        yield next(text_problems(value), None) or value, num_bytes // batch.num_rows


def _value(row: pa.RecordBatch) -> tuple[Any | Problem, int]:
    try:
        num_bytes = decoded_bytes(row)
        if num_bytes > MAX_ROW_BYTES:
            return too_long(), 0
        value = {n: v for n, v in zip(row.schema.names, (_cells(c)[0] for c in row.columns), strict=True) if v is not None}
    except UnicodeDecodeError as error:
        message = f"a text holds bytes that are not UTF-8: {error.reason}"
        return Problem("invalid_utf8", message, fix="write UTF-8 text"), 0
    except (pa.ArrowException, ValueError, OverflowError) as error:
        message = f"a value cannot be read: {str(error)[:120]}"
        return Problem("wrong_type", message, fix="use text, numbers and lists"), 0
    return next(text_problems(value), None) or value, num_bytes


def _cells(column: pa.Array) -> list[Any]:
    """Returns the values of a column; objects have only the keys that are not null, which the writer may have filled in."""
    change, values = _without_nulls(column), column.to_pylist()
    return values if change is None else [None if value is None else change(value) for value in values]


def _without_nulls(array: pa.Array) -> Callable[[Any], Any] | None:
    """Returns what turns a value of `array`, which is not null, into JSON; None if all are JSON already, without nulls in objects."""
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return _without_nulls(array.storage)
    if pa.types.is_struct(kind):
        fields = [array.field(index) for index in range(kind.num_fields)]
        inner = {field.name: change for field, values in zip(kind, fields, strict=True) if (change := _without_nulls(values)) is not None}
        return _of_struct(inner) if inner or any(values.null_count for values in fields) else None
    if pa.types.is_map(kind):  # its nulls were written
        within = _without_nulls(array.items)
        return lambda value: {k: item if within is None or item is None else within(item) for k, item in value}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        of_items = _without_nulls(array.values)
        return None if of_items is None else lambda value: [None if item is None else of_items(item) for item in value]
    return None


def _of_struct(inner: Mapping[str, Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def change(value: Any) -> Any:
        present = {name: item for name, item in value.items() if item is not None}
        for name in inner.keys() & present.keys():
            present[name] = inner[name](present[name])
        return present

    return change


def decoded_bytes(batch: pa.RecordBatch) -> int:
    """Returns the bytes of `batch` with every value expanded."""
    return sum(_decoded_bytes(column) for column in batch.columns)


def _decoded_bytes(array: pa.Array) -> int:
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return _decoded_bytes(array.storage)
    if pa.types.is_dictionary(kind):
        indices = array.indices.drop_null()
        if not pa.types.is_binary(kind.value_type) and not pa.types.is_string(kind.value_type):
            return int(array.nbytes)
        lengths = pc.binary_length(array.dictionary.cast(pa.binary()))
        return int(pc.sum(lengths.take(indices)).as_py() or 0)
    if pa.types.is_struct(kind):
        return sum(_decoded_bytes(child) for child in array.flatten())
    if pa.types.is_map(kind):
        begin, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
        return sum(_decoded_bytes(child.slice(begin, end - begin)) for child in (array.keys, array.items))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _decoded_bytes(array.flatten())
    return int(array.nbytes)
