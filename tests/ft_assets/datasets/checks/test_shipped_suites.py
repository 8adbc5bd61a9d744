"""Suites that ship as hashes: they find what they were made of, hold none of its text, and a report without any says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from control_plane.cli.tenant.data.dataset_report import report_lines
from control_plane.console.documents.report_page import report_page
from ft_assets.datasets.checks.contamination.contaminated_rows import contamination
from ft_assets.datasets.checks.contamination.overlap import SuiteIndex
from ft_assets.datasets.checks.contamination.shipped_suites import DIRECTORY, shipped_index, shipped_suites
from ft_assets.datasets.dedup.normalization import fold
from ft_assets.datasets.ingest import Policies, validate_file
from tests.ft_assets.datasets.examples_of import SHARED_DATA
from tools.suite_hashes import ANNOTATION, hashed


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shipped_index(tmp_path_factory.mktemp("shipped"))


def gsm8k(part: str) -> list[dict[str, str]]:
    file = SHARED_DATA / f"gsm8k_{part}.jsonl"
    if not file.is_file():
        pytest.skip(f"no local copy of GSM8K in {SHARED_DATA}")
    return [json.loads(line) for line in file.read_text().splitlines()]


def flagged(index: Path, texts: list[str]) -> int:
    shares, _ = SuiteIndex.load(index).shares(fold(texts))
    return int((shares > Policies().contamination_threshold).sum())


def test_the_hashes_that_ship_are_those_of_the_test_split() -> None:
    gsm8k("test")
    suite, grams = hashed("gsm8k", SHARED_DATA / "gsm8k_test.jsonl", "MIT")
    assert shipped_suites() == (suite,)
    assert np.array_equal(suite.grams().grams, grams.grams)
    assert len(grams.grams) > 100_000


def test_every_suite_that_ships_has_its_licence_and_none_of_its_text() -> None:
    for suite in shipped_suites():
        assert "Permission is hereby granted" in (DIRECTORY / f"{suite.name}.license.txt").read_text()
        with np.load(DIRECTORY / f"{suite.name}.npz", allow_pickle=False) as file:
            assert {name: file[name].dtype.kind for name in file.files} == {"gaps": "u"}


@pytest.mark.parametrize("form", ["question", "question and answer", "without annotations", "question and result"])
def test_the_test_split_is_found_and_the_train_split_is_not(index: Path, form: str) -> None:
    def text(row: dict[str, str]) -> str:
        if form == "question":
            return row["question"]
        if form == "question and result":
            return f"{row['question']}\n{row['answer'].split('####')[-1]}"
        whole = f"{row['question']}\n{row['answer']}"
        return whole if form == "question and answer" else ANNOTATION.sub("", whole)

    test, train = gsm8k("test"), gsm8k("train")
    assert flagged(index, [text(row) for row in test]) == len(test) == 1319
    near = flagged(index, [text(row) for row in train])
    assert near == (2 if form == "question" else 0), "two train questions repeat more than half of a test question"


def test_an_index_is_built_once(index: Path) -> None:
    stamp = (index / "index.json").stat().st_mtime_ns
    assert shipped_index(index.parent) == index
    assert (index / "index.json").stat().st_mtime_ns == stamp
    assert [p for p in index.parent.iterdir() if p != index] == []


ROWS = [{"messages": [{"role": "user", "content": f"Where is it {i}?"}, {"role": "assistant", "content": f"Here {i}."}]} for i in range(3)]


def every_report(report: Any) -> dict[str, str]:
    """The report as a terminal, a page and Dagster show it."""
    body = asdict(report)
    return {
        "terminal": "\n".join(report_lines(body, name="a.jsonl")),
        "page": report_page(body, name="a.jsonl"),
        "dagster": report.to_markdown(),
    }


@pytest.mark.parametrize("why", ["no suite", "policy off"])
def test_rows_that_were_compared_with_nothing_are_reported_as_not_checked(why: str, index: Path, jsonl: Callable[..., Path]) -> None:
    policies = Policies(min_examples=1, contamination="off" if why == "policy off" else "drop")
    report = validate_file(jsonl(*ROWS), filename="a.jsonl", policies=policies, suites=index if why == "policy off" else None).report
    assert report.stats["contamination"] == {"flagged": None, "suites": {}, "checked": []}
    for place, shown in every_report(report).items():
        assert "contamination: not checked" in shown.lower(), place
        assert "0 rows found" not in shown and "contamination.flagged" not in shown, place


def test_rows_that_were_compared_name_the_suites(index: Path, jsonl: Callable[..., Path]) -> None:
    report = validate_file(jsonl(*ROWS), filename="a.jsonl", policies=Policies(min_examples=1), suites=index).report
    for place, shown in every_report(report).items():
        assert "contamination: 0 rows found in evaluation suites; compared with gsm8k" in shown.lower(), place


def test_an_older_report_without_suites_reads_as_not_checked() -> None:
    assert contamination({"contamination": {"flagged": 0, "suites": {}, "checked": []}}).flagged is None
    assert contamination({}).flagged is None
