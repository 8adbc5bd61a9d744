"""Problems of one cause are one entry of a report: its count, three rows, and the command that reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from control_plane.console.documents.report_page import report_page
from engine.data.blocks.causes import MAX_CAUSES, Causes
from engine.data.ingest import Policies, validate_file
from engine.data.problems import Problem
from engine.data.report.report_text import report_lines
from engine.data.report.validation_report import MAX_SYSTEM_CHARS, problems_of, report_in_order
from tests.engine.data.examples_of import chat

QUESTIONS = [{"question": f"How long does step {i} take?", "ground_truth": f"{i} days"} for i in range(1319)]


def test_one_cause_in_1319_rows_is_one_entry_in_every_report(jsonl: Callable[..., Path]) -> None:
    report = validate_file(jsonl(*QUESTIONS), filename="faq.jsonl", called="data/my faq.jsonl").report
    (problem,) = report.problems
    assert (problem.count, [e.row for e in problem.examples]) == (1319, [1, 2, 3])
    assert problem.label == "a row of an unknown shape"
    assert problem.command == "ft check 'data/my faq.jsonl' --map question=prompt,ground_truth=completion"
    assert problem.examples[1].excerpt == "question 'How long does step 1 take?', ground_truth '1 days'"
    lines = list(report_lines(asdict(report), name="faq.jsonl"))
    assert lines[0] == "faq.jsonl: NOT VALID: 1,319 of 1,319 rows cannot be trained on: a row of an unknown shape"
    assert len(lines) < 12
    assert sum("[unknown_row_shape]" in line for line in lines) == 1
    assert f"      {problem.command}" in lines
    page = report_page(asdict(report), name="faq.jsonl")
    assert page.count("unknown_row_shape") == 1
    assert "1,319" in page
    assert "How long does step 2 take?" in page and "How long does step 3 take?" not in page
    assert report.to_markdown().count("unknown_row_shape") == 1
    assert len(report.errors) == 1000, "rows are listed one by one for programs"


@pytest.mark.parametrize("block_bytes", [200, 5000, 1 << 20])
def test_causes_do_not_depend_on_where_blocks_end(jsonl: Callable[..., Path], block_bytes: int) -> None:
    rows = [*QUESTIONS[:40], chat("a", "b"), *([{"messages": [{"role": f"r{i}", "content": "x"}, 7]} for i in range(30)])]
    path = jsonl(*rows)
    report = validate_file(path, filename="a.jsonl", block_bytes=block_bytes).report
    found = [(p.code, p.path, p.count, [e.row for e in p.examples]) for p in report.problems]
    assert found == [
        ("unknown_row_shape", "", 40, [1, 2, 3]),
        ("invalid_role", "messages[].role", 30, [42, 43, 44]),
        ("wrong_type", "messages[]", 30, [42, 43, 44]),
    ]


def test_a_row_counts_once_for_a_cause_however_often_it_has_it(jsonl: Callable[..., Path]) -> None:
    row = {"messages": [{"role": "robot", "content": "x"}, {"role": "bot", "content": "y"}]}
    report = validate_file(jsonl(row, row), filename="a.jsonl").report
    assert [(p.code, p.count) for p in report.problems] == [("invalid_role", 2)]
    assert report.error_counts == {"invalid_role": 4}


def test_causes_beyond_the_limit_are_counted_by_code() -> None:
    first, second = Causes(), Causes()
    for part, offset in ((first, 0), (second, 300)):
        for i in range(300):
            word = "".join(chr(97 + int(d)) for d in str(i))
            part.add(
                Problem(path="", code="wrong_type", message=f"{word} of {(offset and 'b') or 'a'}", fix="-"), row=offset + i, byte_offset=0
            )
    first.merge(second)
    listed = first.to_list(meanings={})
    assert sum(p.count for p in listed) == 600
    assert len(listed) == MAX_CAUSES + 1
    assert listed[0].count == 600 - MAX_CAUSES
    assert all(len(p.examples) <= 3 for p in listed)


@pytest.mark.parametrize(("pii", "shown"), [("off", True), ("warn", True), ("redact", False), ("reject", False)])
def test_bad_rows_are_not_quoted_where_personal_data_is_to_stay_out(jsonl: Callable[..., Path], pii: str, shown: bool) -> None:
    path = jsonl({"question": "write to jane.doe@example.com", "x": "y"}, chat("mail jane.doe@example.com", "done"), chat("a", "b"))
    report = validate_file(path, filename="a.jsonl", policies=Policies.from_request({"pii": pii, "bad_rows": "drop"})).report
    said = json.dumps([list(map(asdict, report.problems)), report.first_rows])
    assert ("jane.doe@example.com" in said) == shown


def test_the_command_keeps_the_options_that_the_file_was_read_with(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps({"train rows": QUESTIONS[:12]}))
    policies = Policies(encoding="windows-1252", rows_at="train rows")
    (problem,) = validate_file(path, filename="data.json", policies=policies).report.problems
    wanted = "ft check data.json --rows-at 'train rows' --encoding windows-1252 --map question=prompt,ground_truth=completion"
    assert problem.command == wanted


def test_a_report_without_causes_has_those_of_its_errors(jsonl: Callable[..., Path]) -> None:
    report = asdict(validate_file(jsonl(*QUESTIONS[:20]), filename="a.jsonl").report)
    old = {name: value for name, value in report.items() if name not in ("problems", "verdict", "first_rows")}
    (problem,) = problems_of(old)
    assert (problem["code"], problem["count"], len(problem["examples"])) == ("unknown_row_shape", 20, 3)
    assert "NOT VALID" in next(report_lines(old, name="a.jsonl"))
    assert "unknown_row_shape" in report_page(old, name="a.jsonl")


def test_the_first_rows_are_shown_as_they_are_read(jsonl: Callable[..., Path]) -> None:
    pairs = [{"prompt": f"q{i}", "chosen": "good\x1b[31m", "rejected": "b" * 500} for i in range(12)]
    report = validate_file(jsonl(*pairs), filename="a.jsonl").report
    assert [r["row"] for r in report.first_rows] == [1, 2, 3]
    assert report.first_rows[0]["messages"] == [{"role": "user", "content": "q0"}]
    assert report.first_rows[0]["rejected"][0]["content"] == "b" * 200 + "..."
    shown = "\n".join(report_lines(asdict(report), name="a.jsonl"))
    assert "user: q0" in shown
    assert "\x1b" not in shown


def test_system_message_that_the_first_rows_share_is_kept_whole(jsonl: Callable[..., Path]) -> None:
    def system(*texts: str | None) -> str | None:
        rows = [chat(f"question {n * 37}", f"answer {n * 91}") for n in range(len(texts))]
        for row, text in zip(rows, texts, strict=True):
            row["messages"] = [*([{"role": "system", "content": text}] if text else []), *row["messages"]]
        return validate_file(jsonl(*rows), filename="a.jsonl").report.system

    long = "Be short,\nand polite. " * 50
    assert system(*[long] * 12) == long
    assert system(long, long, long, *["Be rude."] * 9) == long, "those of the first rows"
    assert system(long, f"{long}!", *[long] * 10) is system(long, None, *[long] * 10) is None
    assert system(*[None] * 12) is system(*["x" * (MAX_SYSTEM_CHARS + 1)] * 12) is None


def test_the_verdict_comes_first_and_says_what_the_file_is_good_for(jsonl: Callable[..., Path]) -> None:
    def verdict(rows: int, **policies: str) -> str:
        path = jsonl(*(chat(f"question {i * 37}", f"answer {i * 91}") for i in range(rows)))
        report = validate_file(path, filename="a.jsonl", policies=Policies.from_request(policies)).report
        stored = json.loads(json.dumps(asdict(report), sort_keys=True))  # as a database gives it back
        assert list(report_in_order(stored)) == list(asdict(report))
        assert next(iter(report_in_order(stored))) == "verdict"
        return report.verdict

    assert verdict(120) == "valid: 120 examples, read as chat"
    assert verdict(9) == "too few examples to train on (9); it can be a validation file"
