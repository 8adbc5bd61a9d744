"""A file that is one JSON object: its keys that hold rows are listed, and one of them is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.data.ingest import Policies, load_rows, validate_file
from engine.data.readers.json_object import read_object
from engine.data.report.validation_report import DatasetReport
from tests.engine.data.examples_of import chat

ROWS = {"meta": {"rows": [{"no": "row"}]}, "train": [chat(f"q{i}", f"a {i * 7}") for i in range(12)], "te st": [chat("x", "y")], "n": 1}


def check(path: Path, *, output: Path | None = None, rows_at: str | None = None) -> DatasetReport:
    return validate_file(path, filename=path.name, policies=Policies(rows_at=rows_at), output=output).report


def write(path: Path, value: Any, **how: Any) -> Path:
    path.write_text(json.dumps(value, **how))
    return path


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.text(st.sampled_from('ab"\\,:[]{} é'), max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(st.sampled_from('ab"\\[{'), max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(
    value=st.dictionaries(st.text(st.sampled_from('ab"\\]}é'), max_size=4), VALUES, max_size=4), size=st.integers(1, 9), wide=st.booleans()
)
def test_what_stands_under_the_keys_is_what_json_says(value: dict[str, Any], size: int, wide: bool) -> None:
    text = json.dumps(value, indent=1 if wide else None, ensure_ascii=wide).encode()
    found = read_object([text[i : i + size] for i in range(0, len(text), size)])
    assert found is not None
    objects = {k: sum(isinstance(i, dict) for i in v) for k, v in value.items() if isinstance(v, list)}
    assert {a.key: a.num_rows for a in found.arrays} == {k: n for k, n in objects.items() if n}
    assert all(text[a.offset : a.offset + 1] == b"[" for a in found.arrays)
    texts = [k for k, v in value.items() if isinstance(v, list) and v and all(isinstance(i, str) for i in v)]
    assert (found.columns, found.num_keys) == (texts, len(value))


@pytest.mark.parametrize("text", [b'{"a": 1}\n{"a": 2}', b'{"a": [{', b"[1]", b'{"a": 1} x', b""])
def test_what_is_not_one_object_is_none(text: bytes) -> None:
    assert read_object([text[i : i + 3] for i in range(0, len(text), 3)]) is None


@pytest.mark.parametrize("how", [{}, {"indent": 2}])
def test_the_keys_that_hold_rows_are_listed_with_the_command_for_one(tmp_path: Path, how: dict[str, int]) -> None:
    report = check(write(tmp_path / "data.json", ROWS, **how))
    (problem,) = report.problems
    assert problem.code == "rows_in_object"
    assert "'train' (12 rows) and 'te st' (1 row)" in problem.message
    assert "meta" not in problem.message
    assert problem.command == "ft check data.json --rows-at train"


@pytest.mark.parametrize("how", [{}, {"indent": 2}])
def test_the_rows_under_a_key_are_read_and_nothing_else(tmp_path: Path, how: dict[str, int]) -> None:
    path = write(tmp_path / "data.json", ROWS, **how)
    report = check(path, output=tmp_path / "out.parquet", rows_at="train")
    assert (report.valid, report.rows, report.container) == (True, 12, {"format": "json_object", "compression": None})
    assert [e.messages[0].content for e in load_rows(tmp_path / "out.parquet")] == [f"q{i}" for i in range(12)]
    assert (check(path, rows_at="te st").rows, check(path, rows_at="te st").errors) == (1, ())


def test_a_bad_row_under_a_key_is_named_by_its_number_and_place(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    content = b'{"pad": "' + b"x" * 400_000 + b'", "rows": [' + json.dumps(chat("a", "b")).encode() + b', {"messages": 3}], "z": [1]}'
    path.write_bytes(content)
    (error,) = check(path, rows_at="rows").errors
    assert (error.row, error.byte_offset) == (2, content.index(b'{"messages": 3}'))


@pytest.mark.parametrize("rows_at", ["none", "n", "meta"])
def test_a_key_without_rows_is_refused_with_those_that_have_some(tmp_path: Path, rows_at: str) -> None:
    report = check(write(tmp_path / "data.json", ROWS), rows_at=rows_at)
    assert report.error_counts == {"rows_in_object": 1}
    assert "'train' (12 rows)" in report.errors[0].message


def test_a_key_means_nothing_where_rows_stand_one_after_another(jsonl: Callable[..., Path]) -> None:
    report = check(jsonl(chat("a", "b"), chat("c", "d")), rows_at="messages")
    assert report.error_counts == {"rows_in_object": 1}


def test_one_row_alone_is_a_row(tmp_path: Path) -> None:
    assert check(write(tmp_path / "one.jsonl", chat("a", "b"))).valid
    rows = [{"id": i, "turns": [{"q": "a"}]} for i in range(2)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert check(path).error_counts == {"unknown_row_shape": 2}


def test_a_table_by_columns_is_refused_with_the_way_to_write_rows(tmp_path: Path) -> None:
    report = check(write(tmp_path / "columns.json", {"question": ["a", "b"], "answer": ["c", "d"]}))
    assert report.error_counts == {"rows_in_object": 1}
    assert "orient='records'" in report.errors[0].message
