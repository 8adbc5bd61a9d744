"""Opens any accepted file as a stream of rows, and a JSONL file also as blocks of lines that can be checked independently."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from core.typed_json import JsonObject
from engine.data.readers.blocks import BLOCK_BYTES, LineBlock, line_blocks
from engine.data.readers.column_map import FIELDS, apply_map, check_columns, parse_column_map
from engine.data.readers.containers import MAX_DECODED_BYTES, Meter, RowLimit, Sniffed, chunks, refuse, sniff
from engine.data.readers.csv_rows import csv_rows
from engine.data.readers.encodings import UTF8
from engine.data.readers.free_form import decode_texts
from engine.data.readers.json_object import JsonObject as WholeObject
from engine.data.readers.json_object import RowArray, read_object
from engine.data.readers.json_rows import array_rows, jsonl_rows
from engine.data.readers.parquet_rows import parquet_rows
from engine.data.readers.raw_row import Row

MAX_KEYS = 20
"""Keys of an object that a refusal lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """An open file. `rows` and `blocks` read it independently: use one of them."""

    sniffed: Sniffed
    columns: tuple[str, ...] | None
    """Columns of CSV and Parquet; None if each row has its own keys."""
    rows: Iterator[Row]
    """With the column map applied, and JSON in texts parsed."""
    blocks: Iterator[LineBlock] | None
    """For JSONL only, as they are: see :func:`apply_map` and :func:`decode_texts`."""
    total_bytes: int
    """Size of the stored file, compressed or not."""
    consumed: Callable[[], int]
    """Bytes of `total_bytes` read so far: the measure of progress."""


def open_rows(
    path: Path,
    *,
    filename: str,
    column_map: Mapping[str, str] | None = None,
    encoding: str = UTF8,
    rows_at: str | None = None,
    max_bytes: int = MAX_DECODED_BYTES,
    block_bytes: int = BLOCK_BYTES,
) -> Opened:
    """Opens the rows of `path`, whose text is in `encoding`; of one JSON object, those under its key `rows_at`.

    Raises ``InvalidDataset`` if it is not a dataset; so may the iterator, for a torn container.
    """
    sniffed = sniff(path, filename=filename, max_bytes=max_bytes, encoding=encoding)
    skip = sniffed.skip_bytes
    meter = Meter(total_bytes=path.stat().st_size)
    blocks: Iterator[LineBlock] | None = None
    columns: list[str] | None = None
    if rows_at is not None or sniffed.begins_object:
        whole = read_object(chunks(path, max_bytes=max_bytes, encoding=encoding), skip=skip) if sniffed.begins_object else None
        if (found := _rows_within(whole, rows_at, sniffed, filename)) is not None:
            sniffed, skip = replace(sniffed, format="json_object"), found.offset
    if sniffed.format == "parquet":
        columns, rows = parquet_rows(path, max_bytes=max_bytes, meter=meter)
    else:
        data = chunks(path, max_bytes=max_bytes, meter=meter, encoding=encoding)
        if sniffed.format == "csv":
            columns, rows = csv_rows(data, delimiter=sniffed.delimiter, skip=skip, skip_lines=sniffed.skip_lines)
        elif sniffed.format == "jsonl":
            rows = jsonl_rows(data, skip=skip)
            again = chunks(path, max_bytes=max_bytes, meter=meter, encoding=encoding)
            blocks = line_blocks(again, skip=skip, block_bytes=block_bytes)
        else:
            rows = array_rows(data, skip=skip, enclosed=sniffed.format == "json_object")
    packed = sniffed.compression is not None or sniffed.format == "parquet"
    limit = partial(RowLimit, stored_bytes=meter.total_bytes, is_packed=packed, max_bytes=max_bytes)
    rows = _limited(rows, limit(), decoded=sniffed.format == "parquet")
    if blocks is not None:
        blocks = _limited_blocks(blocks, limit())
    if column_map:
        check_columns(column_map, columns, filename)
        rows = _changed(rows, partial(apply_map, column_map=column_map, every_key=columns is None))
    rows = _changed(rows, decode_texts)
    return Opened(
        sniffed=sniffed,
        columns=None if columns is None else tuple(columns),
        rows=rows,
        blocks=blocks,
        total_bytes=meter.total_bytes,
        consumed=lambda: meter.consumed,
    )


def _rows_within(whole: WholeObject | None, rows_at: str | None, sniffed: Sniffed, filename: str) -> RowArray | None:
    """Returns the array with the rows of the file's only object; None for a file of consecutive rows, which needs no key."""
    arrays = whole.arrays if whole is not None else []
    if rows_at is not None:
        if (found := next((a for a in arrays if a.key == rows_at), None)) is not None:
            return found
        there = f"its keys that hold rows are {_spelled(arrays)}" if arrays else "it is not a JSON object with rows under a key"
        raise refuse("rows_in_object", f"{filename} holds no rows under {rows_at[:80]!r}: {there}")
    if arrays and not any(a.key in FIELDS for a in arrays):
        options = f"--rows-at {shlex.quote(arrays[0].key)}"
        raise refuse(
            "rows_in_object", f"{filename} is one JSON object with rows under {_spelled(arrays)}; name the key to read", options=options
        )
    if whole is not None and whole.is_columns:
        how = "with pandas: df.to_json('rows.jsonl', orient='records', lines=True)"
        raise refuse("rows_in_object", f"{filename} is one JSON object with a list for each column; write one object for each row, {how}")
    if sniffed.is_spread:
        raise refuse(
            "unknown_format", f"{filename} is one JSON object over several lines; write one object per line (JSONL), or an array of objects"
        )
    return None


def _spelled(arrays: Sequence[RowArray]) -> str:
    shown = [f"{a.key[:80]!r} ({a.num_rows:,} row{'s' if a.num_rows != 1 else ''})" for a in arrays[:MAX_KEYS]]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _limited(rows: Iterable[Row], limit: RowLimit, *, decoded: bool) -> Iterator[Row]:
    for row in rows:
        limit.take(1, row.num_bytes if decoded else 0)
        yield row


def _limited_blocks(blocks: Iterable[LineBlock], limit: RowLimit) -> Iterator[LineBlock]:
    for block in blocks:
        limit.take(block.data.count(b"\n"))
        yield block


def _changed(rows: Iterable[Row], change: Callable[[JsonObject], object]) -> Iterator[Row]:
    """Yields `rows` with the values that `change` makes of theirs, problems apart."""
    for row in rows:
        yield replace(row, value=change(row.value)) if isinstance(row.value, dict) else row


__all__ = ["Opened", "apply_map", "open_rows", "parse_column_map"]
