"""Contamination lists that ship as hashes: they find what they were made of, hold none of its text, and a report without any says so."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from control_plane.console.documents.report_page import report_page
from core.errors import FtError
from engine.data.checks.contamination.contaminated_rows import contamination
from engine.data.checks.contamination.overlap import SuiteGrams, SuiteIndex
from engine.data.checks.contamination.shipped_suites import DIRECTORY, shipped_index, shipped_suites
from engine.data.dedup.normalization import fold
from engine.data.ingest import Policies, validate_file
from engine.data.report.report_text import report_lines
from tests.engine.data.examples_of import SHARED_DATA
from tools import licences
from tools.suite_hashes import ANNOTATION, SOURCES, hashed, make


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
    suite, grams = hashed("gsm8k", [SHARED_DATA / "gsm8k_test.jsonl"])
    assert suite in shipped_suites()
    assert np.array_equal(suite.grams().grams, grams.grams)
    assert len(grams.grams) > 100_000


def test_every_suite_that_ships_has_its_licence_and_none_of_its_text() -> None:
    for suite in shipped_suites():
        notice, (licence, origin) = (DIRECTORY / f"{suite.name}.license.txt").read_text(), SOURCES[suite.name]
        assert (suite.license, origin in notice, len(notice) > 500) == (licence, True, True)
        with np.load(DIRECTORY / f"{suite.name}.npz", allow_pickle=False) as file:
            assert {name: file[name].dtype.kind for name in file.files} == {"gaps": "u"}


QUESTION = "In which of the {} harbours did the old pilot who had lost his compass wait for the tide to turn before the evening?"
FORMS: dict[str, dict[str, Any]] = {
    "mmlu": {"question": QUESTION, "choices": ["first", "second"], "answer": 1},
    "hellaswag": {"ctx": QUESTION, "endings": ["first", "second"], "label": "1"},
    "truthfulqa": {"question": QUESTION, "best_answer": "first", "correct_answers": ["first", "second"]},
    "arc_easy": {"question": QUESTION, "choices": {"text": ["first", "second"], "label": ["A", "B"]}},
    "arc_challenge": {"question": QUESTION, "choices": {"text": ["first", "second"], "label": ["A", "B"]}},
}


@pytest.mark.parametrize("name", FORMS)
def test_a_list_made_from_local_copies_finds_its_questions_and_names_its_licence(name: str, tmp_path: Path) -> None:
    parts = [tmp_path / f"test-{part}.jsonl" for part in range(2)]
    for part, path in enumerate(parts):
        rows = [{**FORMS[name], next(iter(FORMS[name])): QUESTION.format(f"{part} {i}")} for i in range(3)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "LICENSE").write_text("You may share it.")
    made = make(name, tmp_path / "LICENSE", parts, directory=tmp_path / "out")
    assert (made.num_items, made.unmatchable, made.license) == (6, 0, SOURCES[name][0])
    notice = (tmp_path / "out" / f"{name}.license.txt").read_text()
    assert SOURCES[name][1] in notice and notice.endswith("You may share it.")
    with np.load(tmp_path / "out" / f"{name}.npz", allow_pickle=False) as file:
        grams = np.cumsum(file["gaps"], dtype=np.uint64)
    index = SuiteIndex.from_grams({name: SuiteGrams(grams=grams, num_items=6, unmatchable=0)})
    shares, _ = index.shares(fold([QUESTION.format("1 2"), QUESTION.replace("pilot", "baker").replace("tide", "wind").format("9 9")]))
    assert shares[0] == 1.0 and shares[1] < 0.5


@pytest.mark.parametrize(
    ("name", "row", "says"),
    [
        ("squad", {"question": "q"}, "choose one of gsm8k, mmlu"),
        ("mmlu", {"prompt": "q"}, "has prompt; mmlu needs question,choices"),
        ("mmlu", None, "is empty"),
    ],
)
def test_a_copy_that_cannot_be_hashed_is_refused(name: str, row: dict[str, Any] | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text("" if row is None else json.dumps(row) + "\n")
    with pytest.raises((SystemExit, FtError)) as refused:
        hashed(name, [path])
    assert says in str(refused.value)


def test_third_party_names_the_licence_of_every_list_that_ships() -> None:
    assert "\n".join(licences.lists()) in (licences.ROOT / licences.FILE).read_text()


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
    """The report as a terminal, a page and Dagster show it; the page has the first word as a heading."""
    body = asdict(report)
    return {
        "terminal": "\n".join(report_lines(body, name="a.jsonl")),
        "page": re.sub(r"Contamination</h2>.*?<p[^>]*>", "contamination: ", report_page(body, name="a.jsonl"), flags=re.DOTALL),
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
        assert "contamination: 0 rows found in contamination lists; compared with gsm8k" in shown.lower(), place


def test_an_older_report_without_suites_reads_as_not_checked() -> None:
    assert contamination({"contamination": {"flagged": 0, "suites": {}, "checked": []}}).flagged is None
    assert contamination({}).flagged is None
