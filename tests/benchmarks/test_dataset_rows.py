"""The labelled rows that the benchmarks measure on: the same for the same seed, and as they are labelled."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.datasets.rows import read_labels, write_rows
from engine.data.ingest import Policies, validate_file


@pytest.mark.slow
def test_the_same_seed_writes_the_same_file_whatever_the_processes(tmp_path: Path) -> None:
    one = write_rows(tmp_path / "one.jsonl", num_rows=22_000, seed=3, processes=1)
    two = write_rows(tmp_path / "two.jsonl", num_rows=22_000, seed=3, processes=2)
    other = write_rows(tmp_path / "other.jsonl", num_rows=500, seed=4, processes=1)
    assert one.read_bytes() == two.read_bytes()
    assert other.read_bytes() != one.read_bytes()[: other.stat().st_size]


@pytest.mark.slow
def test_every_row_that_is_labelled_bad_is_found_and_no_other(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", num_rows=20_000, seed=5, processes=1)
    labels = read_labels(path)
    bad = {label.row + 1 for label in labels if label.kind == "bad"}
    report = validate_file(path, filename="rows.jsonl", policies=Policies(bad_rows="drop")).report
    assert len({label.detail for label in labels if label.kind == "bad"}) >= 25
    assert report.stats["bad_rows"] == len(bad) > 200
    assert {e.row for e in report.errors} <= bad
    assert report.stats["duplicates"]["exact"] >= sum(label.kind == "exact" for label in labels) > 500
