"""Opens any accepted file as a stream of rows, with an optional renaming of columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ft_assets.datasets.problems import Problem
from ft_assets.datasets.readers.containers import MAX_BYTES, UTF8_BOM, Sniffed, chunks, refuse, sniff
from ft_assets.datasets.readers.json_rows import array_rows, jsonl_rows
from ft_assets.datasets.readers.rows import Row
from ft_assets.datasets.readers.tabular_rows import csv_rows, decode_cells, parquet_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    sniffed: Sniffed
    columns: tuple[str, ...] | None
    """Of CSV and Parquet; None where each row has its own keys."""
    rows: Iterator[Row]


def open_rows(path: Path, *, filename: str, column_map: Mapping[str, str] | None = None, max_bytes: int = MAX_BYTES) -> Opened:
    """The rows of `path`. Raises ``InvalidDataset`` when it is no dataset at all; so may the iterator, for a torn container."""
    sniffed = sniff(path, filename=filename, max_bytes=max_bytes)
    skip = len(UTF8_BOM) if sniffed.bom else 0
    columns: list[str] | None = None
    if sniffed.format == "parquet":
        columns, rows = parquet_rows(path, max_bytes=max_bytes)
    elif sniffed.format == "csv":
        columns, rows = csv_rows(chunks(path, max_bytes=max_bytes), delimiter=sniffed.delimiter, skip=skip)
    else:
        read = jsonl_rows if sniffed.format == "jsonl" else array_rows
        rows = read(chunks(path, max_bytes=max_bytes), skip=skip)
    if columns is not None and column_map and (absent := sorted(set(column_map) - set(columns))):
        raise refuse("unknown_column", f"the column map names {', '.join(absent)}; {filename} has the columns {', '.join(columns)[:400]}")
    if column_map:
        rows = _mapped(rows, column_map, every_key=columns is None)
    if sniffed.format == "csv":
        rows = _decoded(rows)
    return Opened(sniffed=sniffed, columns=None if columns is None else tuple(columns), rows=rows)


def parse_column_map(text: str) -> dict[str, str]:
    """``text=prompt,category=completion`` as a mapping from source column to target field."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if not pairs or not all(source.strip() and target.strip() for source, _, target in pairs):
        raise refuse("unknown_column", f"column map {text[:120]!r} is not of the form text=prompt,category=completion")
    return {source.strip(): target.strip() for source, _, target in pairs}


def _mapped(rows: Iterable[Row], column_map: Mapping[str, str], *, every_key: bool) -> Iterator[Row]:
    """Rows with only the mapped columns, under their new names."""
    for row in rows:
        if isinstance(row.value, dict):
            absent = [c for c in column_map if c not in row.value]
            if absent and every_key:
                message = f"the mapped column {absent[0]!r} is missing"
                problem = Problem(
                    path=absent[0],
                    code="missing_field",
                    message=message,
                    fix=f"add it to the row or map another column to {column_map[absent[0]]!r}",
                )
                yield replace(row, value=problem)
                continue
            value: dict[str, Any] = {target: row.value[source] for source, target in column_map.items() if source in row.value}
            row = replace(row, value=value)
        yield row


def _decoded(rows: Iterable[Row]) -> Iterator[Row]:
    for row in rows:
        yield replace(row, value=decode_cells(row.value)) if isinstance(row.value, dict) else row
