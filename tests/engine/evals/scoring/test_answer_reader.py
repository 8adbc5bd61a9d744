"""Reasoning in answers is taken off before they are scored, or scored with them; the report keeps it both ways."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from core.errors import InvalidRequest
from engine.data.tokens.reasoning_probe import ThinkMarks
from engine.evals.config import parse_eval_config
from engine.evals.scoring import judge
from engine.evals.scoring.report import EvalReport, sample_rows, score_table
from engine.evals.suites import model_requests, suite_items
from engine.evals.suites.answer_reader import AnswerReader, ReasoningCount
from engine.evals.suites.suite_items import Item
from tests.engine.data.tokens.test_templates import build
from tests.support.jobs.evaluation_results import built, result, section, subject
from tests.support.models.reasoning_templates import CHANNELS, ONE_LINE

CHANNEL_MARKS = ThinkMarks(before="/analysis", after="assistant/final", plain="/final")
WRITTEN = {ThinkMarks(): "<think>\n{}\n</think>\n\n{}", CHANNEL_MARKS: "/analysis\n{}assistant/final\n{}"}
"""How a model of each template writes reasoning and answer, with other white space than the rows have."""


def holdout(n: int = 8) -> list[Item]:
    return [
        Item(id=f"i{k}", messages=({"role": "user", "content": f"q{k}"},), expected=f"answer {k}", reasoning=f"because {k}")
        for k in range(n)
    ]


def answered(items: list[Item], texts: list[str]) -> dict[str, Any]:
    base = {**subject(items), "holdout": section({item.id: "no idea" for item in items})}
    adapter = {**subject(items), "holdout": section({item.id: text for item, text in zip(items, texts, strict=True)})}
    return result(base, adapter)


def exact(made: EvalReport) -> float:
    found = made.score("holdout", "exact_match")
    assert found is not None
    return found.adapter


@pytest.mark.parametrize("marks", WRITTEN)
def test_stripped_answers_are_scored_alone_and_scored_ones_with_their_reasoning(marks: ThinkMarks) -> None:
    items = holdout()
    right = [WRITTEN[marks].format(f"because {k}", f"answer {k}") for k in range(8)]
    otherwise = [WRITTEN[marks].format(f"since {k}", f"answer {k}") for k in range(8)]
    strip, score = (AnswerReader(mode=mode, marks=marks) for mode in ("strip", "score"))  # type: ignore[arg-type]
    for texts, with_reasoning in ((right, 1.0), (otherwise, 0.0)):
        made = answered(items, texts)
        assert exact(built(made, items, reader=strip)) == 1.0
        assert exact(built(made, items, reader=score)) == with_reasoning
    bare = answered(items, [f"answer {k}" for k in range(8)])
    assert (exact(built(bare, items, reader=strip)), exact(built(bare, items, reader=score))) == (1.0, 0.0)
    unreasoned = [replace(item, reasoning="") for item in items]
    assert exact(built(bare, unreasoned, reader=score)) == 1.0
    inline = [replace(item, reasoning=f"<think>\n{item.reasoning}\n</think>\n\n") for item in items]
    assert exact(built(answered(inline, right), inline, reader=score)) == 1.0


def test_a_report_counts_reasoning_that_did_not_end_and_keeps_what_did() -> None:
    items = holdout(4)
    made = answered(items, ["<think>\nhm\n</think>\n\nanswer 0", "<think> so long that no tok", "answer 2", "answer 3"])
    report = built(made, items)
    assert report.reasoning is not None and report.reasoning.mode == "strip"
    counted = ReasoningCount(num_answers=4, with_reasoning=1, unfinished=1, mean_chars=2.0)
    assert report.reasoning.subjects["adapter"] == counted
    assert EvalReport.from_dict(json.loads(json.dumps(asdict(report)))) == report
    assert "Answers with reasoning (strip): adapter 1 of 4, 1 without an end." in score_table(report)
    rows = {row["id"]: row for row in sample_rows(made, items) if row["suite"] == "holdout"}
    assert (rows["i0"]["adapter"], rows["i0"]["reasoning"]) == ("answer 0", {"adapter": "hm"})
    assert (rows["i1"]["adapter"], rows["i1"]["reasoning"]) == ("<think> so long that no tok", None)
    scored = {row["id"]: row for row in sample_rows(made, items, reader=AnswerReader(mode="score"))}
    assert (scored["i0"]["adapter"], scored["i0"]["expected"]) == (
        "<think>\nhm\n</think>\nanswer 0",
        "<think>\nbecause 0\n</think>\nanswer 0",
    )
    assert made["subjects"]["adapter"]["holdout"]["answers"]["i0"].startswith("<think>"), "the answers stay as they were generated"


def test_reports_from_before_reasoning_was_counted_are_read() -> None:
    body = asdict(built(answered(holdout(), ["x"] * 8), holdout()))
    del body["reasoning"]
    assert EvalReport.from_dict(body).reasoning is None


def test_golden_answers_are_read_without_their_reasoning_in_either_mode() -> None:
    items = holdout()
    made = answered(items, ["x"] * 8)
    golden = made["subjects"]["adapter"]["golden"]["answers"]
    made["subjects"]["adapter"]["golden"]["answers"] = {id_: f"<think>\n{'no ' * 99}\n</think>\n\n{text}" for id_, text in golden.items()}
    for mode in ("strip", "score"):
        coherent = built(made, items, reader=AnswerReader(mode=mode)).score("golden", "coherent")  # type: ignore[arg-type]
        assert coherent is not None and coherent.adapter == 1.0


def test_the_judge_sees_what_is_scored() -> None:
    items = holdout(1)
    given = {"i0": "<think>a</think>yes"}, {"i0": "no"}
    (stripped,) = judge.pairs_of(items, *given, limit=1)
    assert (stripped.candidate, stripped.base) == ("yes", "no")
    reader = AnswerReader(mode="score")
    (scored,) = judge.pairs_of(reader.items(items), *given, limit=1, reader=reader)
    assert (scored.candidate, scored.expected) == ("<think>\na\n</think>\nyes", "<think>\nbecause 0\n</think>\nanswer 0")
    (golden,) = judge.pairs_of(items, *given, limit=1, reader=reader, suite="golden")
    assert golden.candidate == "yes"


def test_the_marks_are_those_of_the_base_models_template(tmp_path: Path) -> None:
    model = build(tmp_path / "channels", "chatml")
    (model / "chat_template.jinja").write_text(CHANNELS)
    assert AnswerReader.of_model(model, mode="score") == AnswerReader(mode="score", marks=CHANNEL_MARKS)
    assert AnswerReader.of_model(tmp_path, mode="strip") == AnswerReader()


def test_an_items_variables_decide_which_marks_its_answer_has(tmp_path: Path) -> None:
    model = build(tmp_path / "opens", "chatml")
    closing = ONE_LINE.replace(
        "<think>' }}{% endif %}", "<think>' }}{% if enable_thinking is false %}{{ '</think>' }}{% endif %}{% endif %}"
    )
    (model / "chat_template.jinja").write_text(closing)
    thinking, plain = holdout(2)
    items = [thinking, replace(plain, reasoning="", template_kwargs={"enable_thinking": False})]
    for mode in ("strip", "score"):
        reader = AnswerReader.of_model(model, mode=mode, items=items)  # type: ignore[arg-type]
        assert (reader.marks.before, reader.item_marks["i1"]) == ("", ThinkMarks())
        report = built(answered(items, ["because 0</think>answer 0", "answer 1"]), items, reader=reader)
        assert report.reasoning is not None
        assert report.reasoning.subjects["adapter"] == ReasoningCount(num_answers=2, with_reasoning=1, unfinished=0, mean_chars=9.0)
        assert exact(report) == 1.0
    assert reader.text("i1", "write </think> to end it", suite="holdout") == "write </think> to end it"


def test_a_rows_variables_are_part_of_its_item_and_its_request() -> None:
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    plain, switched = (
        suite_items.holdout_items([{"messages": messages, **more}])[0]
        for more in ({}, {"chat_template_kwargs": {"enable_thinking": False}})
    )
    assert plain.id != switched.id and "template_kwargs" not in plain.to_dict()
    suites = [suite_items.holdout_suite([item], suite_items.Decoding()) for item in (plain, replace(switched, id=plain.id))]
    (request,) = suites[1].requests
    assert isinstance(request, model_requests.Generate) and request.template_kwargs == {"enable_thinking": False}
    assert suites[0].digest != suites[1].digest
    assert suites[0].digest.startswith("60b8da89affcfb95"), "requests without variables keep the digests of kept answers"


def test_the_option_is_one_of_two_words() -> None:
    assert (parse_eval_config({}).reasoning, parse_eval_config({"reasoning": "score"}).reasoning) == ("strip", "score")
    with pytest.raises(InvalidRequest, match="reasoning 'keep' is not one of strip, score"):
        parse_eval_config({"reasoning": "keep"})
