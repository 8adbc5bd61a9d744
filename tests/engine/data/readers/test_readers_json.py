"""Rows of JSON that would be slow to refuse: each is looked through once, however long it is."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.data.problems import Problem
from engine.data.readers.json_rows import MAX_DEPTH, array_rows, jsonl_rows, parse_json


def test_a_key_that_stands_twice_among_half_a_million_is_found() -> None:
    """Counting each key among all takes hours."""
    raw = ("{" + ",".join(f'"k{i}":1' for i in range(500_000)) + ',"k499999":2}').encode()
    value = parse_json(raw)
    assert isinstance(value, Problem)
    assert (value.code, value.path) == ("duplicate_key", "k499999")


@pytest.mark.parametrize("piece", [b'\\"', b"\\\\", b"x", b'"', b'"a', b'\\"['])
def test_a_deep_row_with_a_string_that_does_not_end_is_refused(piece: bytes) -> None:
    """Looking for the end of a string from each of its quotes takes hours."""
    for opening in (b"[" * MAX_DEPTH, b"[" * (MAX_DEPTH + 1)):
        value = parse_json(opening + b'[]"' + piece * ((1 << 22) // len(piece)))
        assert isinstance(value, Problem)
        assert value.code in ("too_deep", "invalid_json", "truncated_json")


@settings(max_examples=300, deadline=None)
@given(value=st.recursive(st.text(alphabet='[]{}"\\a', max_size=4), lambda inner: st.lists(inner, max_size=3), max_leaves=30))
def test_depth_is_that_of_the_value_whatever_its_texts_hold(value: object) -> None:
    def depth(of: object) -> int:
        return 1 + max(map(depth, of), default=0) if isinstance(of, list) else 0

    wrapped: object = value
    for _ in range(MAX_DEPTH - depth(value)):
        wrapped = [wrapped, "[[", "[", "]"]
    assert parse_json(json.dumps(wrapped).encode()) == wrapped
    deeper = parse_json(json.dumps([wrapped]).encode())
    assert isinstance(deeper, Problem)
    assert deeper.code == "too_deep"


def test_rows_know_how_many_bytes_they_take() -> None:
    elements = [b'{"text": "a"}', b' {"text": "bcd"} ', b"[1"]
    assert [r.num_bytes for r in array_rows([b"[" + b",".join(elements[:2]) + b"]"])] == [len(e) for e in elements[:2]]
    assert [r.num_bytes for r in jsonl_rows([b"\n".join(elements)])] == [len(e) for e in elements]
