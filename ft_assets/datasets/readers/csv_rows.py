"""Rows of CSV files as objects of column to value; empty cells are absent."""

from __future__ import annotations

import copy
import csv
from collections.abc import Iterable, Iterator
from typing import Any

from ft_assets.datasets.problems import Problem
from ft_assets.datasets.readers.containers import refuse
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
        yield Row(number=number, byte_offset=offset, value=_record(header, fields), num_bytes=lines.taken - offset)


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
