"""Rows of CSV files as objects of column to value; empty cells are absent."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from core.errors import InvalidDataset
from engine.data.problems import Problem
from engine.data.readers.blocks import line_blocks
from engine.data.readers.containers import refuse
from engine.data.readers.encodings import not_utf8
from engine.data.readers.json_rows import too_long
from engine.data.readers.raw_row import MAX_ROW_BYTES, Row, text_problems

QUOTE_FIX = "quote fields that hold quotes, separators or line breaks, and double the quotes inside"
ESCAPED = re.compile(r"[\udc80-\udcff]")
"""Bytes that are not UTF-8, as ``surrogateescape`` decodes them."""


REREAD_BYTES = 64 << 20
"""Most bytes of lines read again because the records before them could not be parsed, beyond the bytes already read: four records whose
quote is not closed within 16 MiB. Only a file made for it exceeds that."""


_PhysicalLine = tuple[int, int, bytes | None]
"""(1-based number, offset, bytes with the line feed; None for a line over the limit)."""


class _TooLongError(Exception):
    """Carries the offset of a line over the limit through ``csv.reader``."""

    def __init__(self, offset: int) -> None:
        self.offset = offset


@dataclass(slots=True)
class _Record:
    """The record read so far."""

    number: int = 0
    """Number of its first line."""
    offset: int = 0
    num_lines: int = 0
    first_bytes: int = 0
    """Offset of its first line."""
    rest: bytearray = field(default_factory=bytearray)
    """The lines after the first, which may be read again."""
    again_from: int = 0
    """Where it begins in the lines read again."""
    all_again: bool = True
    """All of its lines are read again."""

    @property
    def num_bytes(self) -> int:
        return self.first_bytes + len(self.rest)


class _Lines:
    """Yields physical lines for ``csv.reader``; the lines of a record that cannot be parsed are repeated, except the first."""

    def __init__(self, chunks: Iterable[bytes], skip: int, skip_lines: int) -> None:
        self._source = _physical_lines(chunks, skip, skip_lines)
        self._waiting: _PhysicalLine | None = None
        """A line over the limit inside a record."""
        self._again = io.BytesIO()
        self._again_number = self._again_offset = 0
        """Index of the next line of `_again`."""
        self._fresh_bytes = self._reread_bytes = 0
        self._record = _Record()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        record = self._record
        if raw := self._again.readline():
            number, offset = self._again_number, self._again_offset
            self._again_number, self._again_offset = number + 1, offset + len(raw)
        else:
            number, offset, raw = self._fresh()
            record.all_again = False
        if not record.num_lines:
            record.number, record.offset, record.first_bytes = number, offset, len(raw)
        else:
            record.rest += raw
        record.num_lines += 1
        if record.num_lines > 1 and record.num_bytes > MAX_ROW_BYTES:
            raise self._unclosed(f"is not closed within {MAX_ROW_BYTES} bytes")
        return raw.decode("utf-8", "surrogateescape")

    def _fresh(self) -> tuple[int, int, bytes]:
        line, self._waiting = self._waiting or next(self._source), None
        number, offset, raw = line
        if raw is None:
            if not self._record.num_lines:
                raise _TooLongError(offset)
            self._waiting = line  # the previous record is not closed: it ends first
            raise StopIteration
        self._fresh_bytes += len(raw)
        return number, offset, raw

    def end_record(self) -> _Record:
        """Returns the record read; the next one begins after it."""
        done, self._record = self._record, _Record(again_from=self._again.tell())
        return done

    def give_up_record(self) -> _Record:
        """Returns the record that cannot be parsed; the next one begins at the line after its first."""
        record = self._record
        self._reread_bytes += len(record.rest)
        if self._reread_bytes > REREAD_BYTES + self._fresh_bytes:
            raise self._unclosed("is closed far below or never, as in many records before it")
        if record.num_lines > 1:
            if record.all_again:
                self._again.seek(record.again_from + record.first_bytes)
            else:
                self._again = io.BytesIO(record.rest)
            self._again_number, self._again_offset = record.number + 1, record.offset + record.first_bytes
        return self.end_record()

    def _unclosed(self, what: str) -> InvalidDataset:
        return refuse("invalid_csv", f"the quote that opens in the record on line {self._record.number} {what}; {QUOTE_FIX}")


def _physical_lines(chunks: Iterable[bytes], skip: int, skip_lines: int) -> Iterator[_PhysicalLine]:
    for block in line_blocks(chunks, skip=skip):
        number, offset = block.first_line + skip_lines, block.offset
        for raw in io.BytesIO(block.data):
            yield number, offset, raw
            number, offset = number + 1, offset + len(raw)
        for number, offset in block.oversized:
            yield number + skip_lines, offset, None


def csv_rows(chunks: Iterable[bytes], *, delimiter: str, skip: int = 0, skip_lines: int = 0) -> tuple[list[str], Iterator[Row]]:
    """Yields the header and the records below it; record 1 is the first after the header. `skip`: bytes before the header, `skip_lines` in
    lines.

    A record that cannot be parsed because of an unclosed quote is one bad row of one line; the next one begins at the following line.
    """
    csv.field_size_limit(MAX_ROW_BYTES)
    lines = _Lines(chunks, skip, skip_lines)
    records = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        header = [name.strip() for name in _first(records, lines)]
    except csv.Error as error:
        raise refuse("invalid_csv", f"the header line cannot be parsed ({error}); its fields are separated by {delimiter!r}") from error
    except _TooLongError as error:
        raise refuse("invalid_csv", f"the header line is longer than {MAX_ROW_BYTES} bytes; name the columns in the first line") from error
    if len(set(header)) != len(header) or not all(header):
        raise refuse("invalid_csv", f"the header {header[:20]} has an empty or repeated column name; give each column a unique name")
    if problem := _undecoded(dict.fromkeys(header, "")) or next(text_problems(header), None):
        raise refuse(problem.code, f"in the header line {problem.message}; {problem.fix}", options=problem.options)
    return header, _csv_records(records, lines, header)


def _first(records: Iterator[list[str]], lines: _Lines) -> list[str]:
    """Returns the fields of the first record that is not an empty line."""
    for fields in records:
        lines.end_record()
        if fields:
            return fields
    return []


def _csv_records(records: Iterator[list[str]], lines: _Lines, header: list[str]) -> Iterator[Row]:
    number = 0
    while True:
        try:
            fields = next(records)
        except StopIteration:
            return
        except _TooLongError as error:
            number += 1
            yield Row(number=number, byte_offset=error.offset, value=too_long())
            continue
        except csv.Error as error:
            number += 1
            record = lines.give_up_record()
            yield Row(number=number, byte_offset=record.offset, value=_unparsed(error, record))
            continue
        record = lines.end_record()
        if fields:
            number += 1
            value = _value(header, fields, record.num_lines)
            yield Row(number=number, byte_offset=record.offset, value=value, num_bytes=record.num_bytes)


def _unparsed(error: csv.Error, record: _Record) -> Problem:
    message = f"line {record.number} cannot be parsed: {error}"
    if record.num_lines > 1:
        below = record.num_lines - 1
        message = f"a quote that opens on line {record.number} is not closed where a field ends: {error} ({below} lines below)"
    return Problem("invalid_csv", message, fix=QUOTE_FIX)


def _value(header: list[str], fields: list[str], num_lines: int) -> Any | Problem:
    if len(fields) != len(header):
        over = f" on {num_lines} lines" if num_lines > 1 else ""
        message = f"{len(fields)} fields{over}, but the header has {len(header)}"
        return Problem("column_count", message, fix="quote fields that hold the separator")
    if fields[0].startswith("\ufeff") or fields == header:
        message = "a byte order mark" if fields != header else "the header again"
        fix = "join files without their headers and byte order marks, or remove this line"
        return Problem("invalid_csv", f"{message} inside the file, as from joining several", fix=fix)
    value = dict(zip(header, fields, strict=True))
    return _undecoded(value) or next(text_problems(value), None) or {k: v for k, v in value.items() if v != ""}


def _undecoded(value: dict[str, str]) -> Problem | None:
    """Returns the problem of the first cell or column name whose bytes are not UTF-8."""
    for name, cell in value.items():
        for text, path in ((name, ""), (cell, name)):
            if not text.isascii() and ESCAPED.search(text):
                return not_utf8(text.encode("utf-8", "surrogateescape"), path=path)
    return None
