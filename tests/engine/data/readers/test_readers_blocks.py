"""Blocks of lines and the scan over them agree with the plain reading of a file, however its bytes arrive."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.data.problems import Problem
from engine.data.readers import kernels_scan as scan
from engine.data.readers.blocks import LineBlock, line_blocks
from engine.data.readers.json_rows import jsonl_rows, parse_json
from engine.data.readers.raw_row import MAX_ROW_BYTES

LINES = st.lists(st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"")), max_size=12)


def pieces(content: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(content), *(c % (len(content) + 1) for c in cuts)})
    return [content[a:b] for a, b in itertools.pairwise(places)]


def plain_lines(content: bytes, skip: int, limit: int) -> list[tuple[int, int, bytes | None]]:
    """(number, offset, line) the obvious way; None for a line over `limit`."""
    offset, out = skip, []
    for number, line in enumerate(content[skip:].split(b"\n"), 1):
        out.append((number, offset, None if len(line) > limit else line))
        offset += len(line) + 1
    return out[:-1] if out[-1][2] == b"" else out


def lines_of(blocks: list[LineBlock]) -> list[tuple[int, int, bytes | None]]:
    out: list[tuple[int, int, bytes | None]] = []
    for block in blocks:
        starts, ends = scan.split_lines(np.frombuffer(block.data, dtype=np.uint8))
        for index, (a, b) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            out.append((block.first_line + index, block.offset + a, block.data[a:b]))
        out += [(number, offset, None) for number, offset in block.oversized]
    return out


@settings(max_examples=400, deadline=None)
@given(lines=LINES, ended=st.booleans(), cuts=st.lists(st.integers(0, 400), max_size=12), bom=st.booleans(), size=st.integers(1, 80))
@example(lines=[b"a" * 30, b"b" * 21, b"", b"c"], ended=False, cuts=[1, 2, 25, 52], bom=True, size=10)
def test_blocks_hold_every_line_once_with_its_number_and_offset(
    lines: list[bytes], ended: bool, cuts: list[int], bom: bool, size: int
) -> None:
    content = (b"\xef\xbb\xbf" if bom else b"") + b"\n".join(lines) + (b"\n" if ended else b"")
    skip = 3 if bom else 0
    blocks = list(line_blocks(pieces(content, cuts), skip=skip, block_bytes=size, max_line_bytes=20))
    assert lines_of(blocks) == plain_lines(content, skip, 20)
    assert all(len(block.data) < size + 2 * 20 + 2 for block in blocks), "a block and a line bound the memory"


def test_rows_of_jsonl_have_the_numbers_and_offsets_of_their_lines() -> None:
    content = b"\xef\xbb\xbf" + b'{"a": 1}\r\n\n  \n {"b": 2}\n' + b'"' + b"x" * MAX_ROW_BYTES + b'"\n[3'
    rows = list(jsonl_rows(pieces(content, [2, 9, 5_000_000, 9_999_999]), skip=3))
    assert [(r.number, r.byte_offset) for r in rows] == [(1, 3), (4, 17), (5, 27), (6, 27 + MAX_ROW_BYTES + 3)]
    assert [r.value if isinstance(r.value, dict) else r.value.code for r in rows] == [{"a": 1}, {"b": 2}, "line_too_long", "truncated_json"]


def flags_of(line: bytes) -> int:
    block = b"x\n" + line + b"\ny"
    starts, ends = np.array([0, 2, len(line) + 3]), np.array([1, len(line) + 2, len(line) + 4])
    found = scan.scan_lines(block, starts, ends).tolist()
    assert found[0] == found[2] == 0, "a line's flags are its own"
    return int(found[1])


FLAGGED: dict[str, tuple[bytes, int]] = {
    "a plain row": (b'{"a": [{"b": "c"}, {"b": "d"}], "c": {"a": 1}}', 0),
    "the same key in two objects": (b'[{"a": 1}, {"a": 2, "b": {"a": 3}}, {"b": 1}]', 0),
    "values that look like keys": (b'{"a": "b", "b": "a", "c": ["a", "a"]}', 0),
    "an emoji as a pair of escapes": (b'{"a": "\\ud83d\\ude42 \\u00e9"}', 0),
    "an escaped backslash before u0000": (b'{"a": "\\\\u0000"}', 0),
    "nesting of 64": (b"[" * 64 + b"]" * 64, 0),
    "brackets inside a string": (b'{"a": "' + b"[" * 100 + b'"}', 0),
    "letters over 127": ('{"a": "é"}'.encode(), scan.NON_ASCII),
    "a letter over 127 in a key": ('{"é": 1}'.encode(), scan.NON_ASCII),
    "nothing": (b"", scan.BLANK),
    "white space": (b" \t\r\x0b\x0c", scan.BLANK),
    "a key twice": (b'{"a": 1, "b": 2, "a": 3}', scan.DUPLICATE_KEY),
    "a key twice, far inside": (b'{"m": [{"role": "x", "content": {"t": [1, {"k": 1, "k": 2}]}}]}', scan.DUPLICATE_KEY),
    "a key twice around an object": (b'{"a": {"a": [{"a": 1}]}, "b": [], "a": 2}', scan.DUPLICATE_KEY),
    "an escape in a key": (b'{"\\u0061": 1, "a": 2}', scan.UNSURE),
    "nesting of 65": (b"[" * 65 + b"]" * 65, scan.TOO_DEEP),
    "a NUL": (b'{"a": "b\0"}', scan.NUL),
    "a NUL in a long text": (b'{"a": "' + b"x" * 45 + b"\0" + b"x" * 45 + b'"}', scan.NUL),
    "an escaped NUL": (b'{"a": "' + b"x" * 63 + b'\\u0000"}', scan.NUL),
    "the first half of a pair": (b'{"a": "\\ud83d\\u0041"}', scan.SURROGATE_ESCAPE),
    "the second half of a pair": (b'{"a": "\\uDE42"}', scan.SURROGATE_ESCAPE),
    "more keys than the table takes": (b"{" + b", ".join(b'"%d": 0' % i for i in range(3000)) + b"}", scan.UNSURE),
}


@pytest.mark.parametrize("case", FLAGGED)
def test_a_line_is_flagged_for_what_the_parser_lets_through(case: str) -> None:
    line, flags = FLAGGED[case]
    assert flags_of(line) == flags


def test_a_line_over_the_limit_is_not_looked_at() -> None:
    assert flags_of(b"\0" * (MAX_ROW_BYTES + 1)) == scan.TOO_LONG


class Pairs(list[tuple[str, Any]]):
    """An object that may have a key twice."""


KEYS = st.sampled_from(["a", "b", "role", "é", "k\\", 'q"', "\0", "🙂", "a" * 70])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=70)
    | st.sampled_from(["\ud83d", "x\0", "]}"]),
    lambda inner: st.lists(inner, max_size=4) | st.lists(st.tuples(KEYS, inner), max_size=4).map(Pairs),
    max_leaves=20,
)


def spell(value: Any, *, ascii_only: bool) -> str:
    if isinstance(value, Pairs):
        return "{" + ", ".join(f"{json.dumps(k, ensure_ascii=ascii_only)}: {spell(v, ascii_only=ascii_only)}" for k, v in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(spell(v, ascii_only=ascii_only) for v in value) + "]"
    return json.dumps(value, ensure_ascii=ascii_only)


SEEN = {"clear": 0, "flagged": 0}


@settings(max_examples=500, deadline=None)
@given(value=VALUES, ascii_only=st.booleans(), spoil=st.lists(st.tuples(st.integers(0, 500), st.binary(max_size=2)), max_size=2))
def test_what_is_not_flagged_and_parses_fast_has_the_exact_value_and_no_problem(
    value: Any, ascii_only: bool, spoil: list[tuple[int, bytes]]
) -> None:
    line = spell(value, ascii_only=ascii_only).encode("utf-8", "surrogatepass").replace(b"\n", b" ")
    for at, junk in spoil:
        place = at % (len(line) + 1)
        line = line[:place] + junk.replace(b"\n", b"") + line[place:]
    if flags_of(line) & ~scan.NON_ASCII:
        SEEN["flagged"] += 1
        return
    try:
        fast = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    exact = parse_json(line.strip())
    assert not isinstance(exact, Problem), exact
    assert repr(fast) == repr(exact)
    SEEN["clear"] += 1


def test_the_property_above_met_both_kinds_of_lines() -> None:
    assert (SEEN["clear"] > 100 and SEEN["flagged"] > 100) or sum(SEEN.values()) == 0
