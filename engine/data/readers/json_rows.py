"""Rows of JSONL files and JSON arrays: bounded memory, every bad row reported with its position."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from engine.data.problems import Problem
from engine.data.readers.blocks import line_blocks
from engine.data.readers.encodings import not_utf8
from engine.data.readers.raw_row import MAX_ROW_BYTES, Row, text_problems

MAX_DEPTH = 64
"""Most nesting of one row; a conversation with tools needs about 10."""
STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?+', re.DOTALL)
"""A string, to the end of the row if not closed; matches without backtracking."""
STEPS = {**dict.fromkeys(b"[{", 1), **dict.fromkeys(b"]}", -1)}
"""Change of depth for each bracket."""
NO_BRACKETS = bytes(set(range(256)) - STEPS.keys())
ARRAY_EVENT = re.compile(rb'["\\\[\]{},]')


class _RefusedError(Exception):
    """Carries a problem out of the hooks of the JSON parser."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def parse_json(raw: bytes) -> Any | Problem:
    """Returns the value of one row, or its problem; a byte order mark, left by joining files, is skipped."""
    if b"\0" in raw:
        return Problem("nul_character", f"NUL byte at byte {raw.index(0)} of the row", fix="remove NUL bytes")
    try:
        text = raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError:
        return not_utf8(raw, place=" at byte {at} of the row")
    if raw.count(b"{") + raw.count(b"[") > MAX_DEPTH and _depth(raw) > MAX_DEPTH:
        return Problem("too_deep", f"nested deeper than {MAX_DEPTH}", fix=f"keep rows at most {MAX_DEPTH} levels deep")
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite)
    except _RefusedError as refused:
        return refused.problem
    except json.JSONDecodeError as error:
        return _syntax_problem(text, error)
    except (ValueError, RecursionError) as error:
        return Problem("invalid_json", f"cannot be parsed: {str(error)[:120]}", fix="write one valid JSON object per line")
    if b"\\u" in raw and (problem := next(text_problems(value), None)) is not None:
        return problem
    return value


def jsonl_rows(chunks: Iterable[bytes], *, skip: int = 0) -> Iterator[Row]:
    """Yields one row per non-blank line; the row number is the line number. `skip`: bytes of a byte order mark."""
    for block in line_blocks(chunks, skip=skip):
        offset = block.offset
        lines = block.data.removesuffix(b"\n").split(b"\n") if block.data and not block.data.isspace() else ()
        for number, raw in enumerate(lines, block.first_line):
            if raw.strip():
                yield Row(number=number, byte_offset=offset, value=parse_json(raw.strip()), num_bytes=len(raw))
            offset += len(raw) + 1
        for number, offset in block.oversized:
            yield Row(number=number, byte_offset=offset, value=too_long())


def array_rows(chunks: Iterable[bytes], *, skip: int = 0, enclosed: bool = False) -> Iterator[Row]:
    """Yields the elements of one array, each parsed separately; the array is never held as a whole.

    `skip`: bytes before the array. `enclosed`: it is inside an object, and the text after it is not read.
    """
    for number, (offset, raw, closed) in enumerate(_elements(chunks, skip, enclosed), 1):
        if raw is None:
            yield Row(number=number, byte_offset=offset, value=too_long())
        elif not closed:
            problem = Problem("truncated_json", "the array ends early, inside or after this element", fix="export the file again")
            yield Row(number=number, byte_offset=offset, value=problem)
        elif raw.strip():
            begin = offset + len(raw) - len(raw.lstrip())
            yield Row(number=number, byte_offset=begin, value=parse_json(raw.strip()), num_bytes=len(raw))
        else:
            problem = Problem("invalid_json", "nothing between two commas", fix="remove the extra comma")
            yield Row(number=number, byte_offset=offset, value=problem)


def _elements(chunks: Iterable[bytes], skip: int, enclosed: bool) -> Iterator[tuple[int, bytes | None, bool]]:
    """Yields (offset, bytes, closed) of each element of the array; an unclosed element ends a truncated array."""
    depth, in_string, escaped_at = 0, False, -1
    parts, size, start, position, ended, after = [], 0, 0, 0, False, bytearray()  # type: list[bytes], int, int, int, bool, bytearray
    some = False
    for data in chunks:
        begin = max(0, skip - position)
        for match in ARRAY_EVENT.finditer(data, begin):
            at, char = match.start(), data[match.start()]
            if ended:
                break
            if in_string:
                if position + at == escaped_at:
                    continue
                if char == 0x5C:
                    escaped_at = position + at + 1
                elif char == 0x22:
                    in_string = False
            elif char == 0x22:
                in_string = True
            elif char in b"[{":
                depth += 1
                if depth == 1:
                    begin, start = at + 1, position + at + 1
            elif char in b"]}" or (char == 0x2C and depth == 1):
                depth -= char != 0x2C
                if depth == 0 or char == 0x2C:
                    parts.append(data[begin:at])
                    size += at - begin
                    raw = None if size > MAX_ROW_BYTES else b"".join(parts)
                    if char == 0x2C or some or raw is None or raw.strip():
                        yield start, raw, True
                    some, parts, size, begin, start = True, [], 0, at + 1, position + at + 1
                    ended = depth == 0
        if ended and enclosed:
            return
        if ended:
            after += data[begin:][:64]
        elif depth:
            parts.append(data[begin:])
            size += len(data) - begin
            if size > MAX_ROW_BYTES:
                parts = []
        position += len(data)
    if not ended:
        yield start, b"", False
    elif after.strip():
        yield start, bytes(after), True


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                message = f"the key {key[:80]!r} occurs twice in one object"
                raise _RefusedError(Problem("duplicate_key", message, path=key[:80], fix="keep one of them"))
            seen.add(key)
    return value


def _refuse_constant(name: str) -> Any:
    raise _RefusedError(Problem("non_finite_number", f"{name} is not a JSON number", fix="use null, or leave the field out"))


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_constant(text[:40])


def _syntax_problem(text: str, error: json.JSONDecodeError) -> Problem:
    truncated = error.pos >= len(text) or error.msg.startswith("Unterminated string")
    return Problem(
        "truncated_json" if truncated else "invalid_json",
        (
            f"{error.msg} at character {error.pos + 1}"
            + (": the row ends early" if truncated else f", near {text[error.pos : error.pos + 20]!r}")
        ),
        fix="write each object on one line" if truncated else "write one valid JSON object per line",
    )


def _depth(raw: bytes) -> int:
    brackets = STRING.sub(b"", raw).translate(None, NO_BRACKETS)
    return max(itertools.accumulate(map(STEPS.__getitem__, brackets)), default=0)


def too_long() -> Problem:
    return Problem("line_too_long", f"longer than {MAX_ROW_BYTES} bytes", fix="split the row; one example is at most 16 MiB")
