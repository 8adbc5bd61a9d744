"""CSV files with quotes that are not closed, and with lines over the limit: one bad row each, and the rows below are read."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import InvalidDataset
from engine.data.ingest import Policies, validate_file
from engine.data.problems import Problem
from engine.data.readers.csv_rows import csv_rows
from engine.data.readers.raw_row import MAX_ROW_BYTES, Row

HEADER = b"prompt,completion\n"


def pieces(data: bytes, size: int = 1 << 18) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))


def read(data: bytes, *, skip: int = 0) -> list[Row]:
    return list(csv_rows(pieces(data), delimiter=",", skip=skip)[1])


def found(rows: list[Row]) -> list[tuple[int, int | None, str]]:
    return [(r.number, r.byte_offset, r.value.code if isinstance(r.value, Problem) else r.value["prompt"]) for r in rows]


def test_a_quote_that_is_not_closed_costs_one_row_and_no_other(tmp_path: Path) -> None:
    lines = [b"question %d about %d,answer %d since %d\n" % (i, i * 7, i * 3, i) for i in range(2000)]
    lines[50] = b'question 50,"oops unclosed\n'
    (tmp_path / "f").write_bytes(HEADER + b"".join(lines))
    policies = Policies(min_examples=1, bad_rows="drop", near_duplicates="off")
    report = validate_file(tmp_path / "f", filename="f.csv", policies=policies, output=tmp_path / "rows.parquet").report
    assert (report.rows, report.examples, report.error_counts) == (2000, 1999, {"invalid_csv": 1})
    (error,) = report.errors
    assert (error.row, error.byte_offset) == (51, len(HEADER) + sum(map(len, lines[:50])))
    assert "line 52" in error.message


def test_rows_after_a_record_that_is_given_up_keep_their_numbers_and_offsets() -> None:
    records = [b"a,1\n", b'b,"2\n', b'"c\nc",3\n', b'd,"4\n', b"e,5\n", b'"f,6\n', b"g,7"]
    data = HEADER + b"".join(records)
    places = [len(HEADER) + sum(map(len, records[:i])) for i in range(len(records))]
    rows = read(data)
    assert found(rows) == [
        (1, places[0], "a"), (2, places[1], "invalid_csv"), (3, places[2], "c\nc"), (4, places[3], "invalid_csv"), (5, places[4], "e"),
        (6, places[5], "invalid_csv"), (7, places[6], "g"),
    ]  # fmt: skip
    assert [r.num_bytes for r in rows if not isinstance(r.value, Problem)] == [4, 8, 4, 3]


CELLS = st.sampled_from(["a", "b c", '"', '""', '"a', 'a"', '"a"', '"a\nb"', '"a\n', "", "\n", "\r\n", ",", '","', "\u00e9"])


@settings(max_examples=600, deadline=None)
@given(cells=st.lists(st.tuples(CELLS, st.sampled_from([",", "\n", "\n", "\r\n"])), max_size=20), size=st.integers(1, 7), bom=st.booleans())
def test_rows_are_those_of_a_reader_that_begins_anew_after_each_bad_line(cells: list[tuple[str, str]], size: int, bom: bool) -> None:
    skip = 3 if bom else 0
    head = b"\xef\xbb\xbf"[:skip] + HEADER
    body = "".join(cell + end for cell, end in cells).encode()
    rows = list(csv_rows(pieces(head + body, size), delimiter=",", skip=skip)[1])
    expected: list[tuple[int, str | None]] = []
    at = 0
    while at < len(body):
        record, num_bytes = first_record(body[at:])
        if record is None or record:
            expected.append((len(head) + at, None if record is None else record[0]))
        at += num_bytes
    assert [(r.byte_offset, _first_cell(r)) for r in rows] == [(o, v) for o, v in expected]
    assert [r.number for r in rows] == list(range(1, len(rows) + 1))


def first_record(data: bytes) -> tuple[list[str] | None, int]:
    """(fields, bytes) of the record at the start of `data`; None and the bytes of its first line if it cannot be parsed."""
    lines = list(io.BytesIO(data))
    taken: list[bytes] = []

    def feed() -> Iterator[str]:
        for line in lines:
            taken.append(line)
            yield line.decode()

    try:
        fields = next(csv.reader(feed(), strict=True))
    except csv.Error:
        return None, len(lines[0])
    if fields and len(fields) != 2:
        fields = ["column_count"]
    return fields, sum(map(len, taken))


def _first_cell(row: Row) -> str | None:
    if isinstance(row.value, Problem):
        return None if row.value.code == "invalid_csv" else row.value.code
    return str(row.value.get("prompt", ""))


def test_a_line_of_separators_over_the_limit_is_one_bad_row() -> None:
    data = HEADER + b"a,1\n" + b"," * (MAX_ROW_BYTES + (1 << 20)) + b"\nb,2\n"
    assert found(read(data)) == [
        (1, len(HEADER), "a"), (2, len(HEADER) + 4, "line_too_long"), (3, len(data) - 4, "b"),
    ]  # fmt: skip


def test_a_quote_before_a_line_over_the_limit_is_reported_and_that_line_too() -> None:
    data = HEADER + b'a,"1\nb,2\n' + b"x" * (MAX_ROW_BYTES + 1) + b"\nc,3\n"
    assert [code for _, _, code in found(read(data))] == ["invalid_csv", "b", "line_too_long", "c"]


def test_a_quote_that_is_open_for_longer_than_a_row_may_be_refuses_the_file_and_names_its_line() -> None:
    data = HEADER + b"a,1\n" * 3 + b'b,"2\n' + (b"c" * 60 + b",3\n") * (MAX_ROW_BYTES // 63 + 1)
    rows = csv_rows(pieces(data), delimiter=",")[1]
    assert [next(rows).value["prompt"] for _ in range(3)] == ["a", "a", "a"]
    with pytest.raises(InvalidDataset, match="line 5 is not closed within") as refused:
        next(rows)
    assert refused.value.code == "invalid_csv"


def test_lines_that_each_open_a_quote_to_the_end_are_not_read_again_and_again() -> None:
    """Read to its end from each of its 200,000 lines, this file takes hours."""
    data = HEADER + (b'x","' + b"y" * 45 + b"\n") * 200_000
    rows = csv_rows(pieces(data), delimiter=",")[1]
    with pytest.raises(InvalidDataset, match="closed far below or never") as refused:
        list(rows)
    assert refused.value.code == "invalid_csv"


def test_a_header_over_the_limit_is_refused() -> None:
    with pytest.raises(InvalidDataset, match="header line"):
        csv_rows(pieces(b"," * (MAX_ROW_BYTES + 1)), delimiter=",")
    with pytest.raises(InvalidDataset, match="header line"):
        csv_rows(pieces(b'a,"b\n'), delimiter=",")
