"""Tool calls are read back from the text of a template, and compared by value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.data.tokens.call_form import CallForm
from engine.evals.suites import suite_items, tool_calls
from engine.evals.suites.answer_reader import AnswerReader
from engine.evals.suites.suite_items import Item
from engine.evals.suites.tool_calls import canonical
from tests.engine.data.tokens.test_templates import build
from tests.support.jobs.evaluation_results import built, result, section, subject
from tests.support.models.tiny_model import build_tiny_model

HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% for c in m.tool_calls or [] %}"
    "{{ '<|im_start|>assistant to=functions.' + c.function.name + ' json<|pad|>' + c.function.arguments | tojson + '<|im_end|>' }}"
    "{% endfor %}{{ m.content }}{% else %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)
"""Writes calls like gpt-oss: the name, then the arguments."""
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def call(name: str = "weather", **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def row(*calls: dict[str, Any], text: str | None = None, n: int = 0) -> dict[str, Any]:
    answer = {"role": "assistant", "content": text, "tool_calls": [{"type": "function", "function": c} for c in calls]}
    return {"messages": [{"role": "user", "content": f"question {n}"}, answer], "tools": [TOOL]}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("qwen2_5", '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'),
        ("qwen3", 'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'),
        ("llama3", '{"name": "weather", "parameters": {"city": "Rome", "days": 2}}'),
    ],
)
def test_calls_are_read_as_public_templates_write_them(tmp_path: Path, template: str, text: str) -> None:
    form = CallForm.of_model(build(tmp_path / "model", template))
    assert form is not None
    assert form.read(text) == (call(city="Rome", days=2),)
    assert form.read("It rains in Rome.") == ()
    assert form.read(text[:-20]) == () or template == "qwen2_5"


def test_calls_that_are_a_name_and_then_arguments_are_read_too(tmp_path: Path) -> None:
    form = CallForm.of_model(build_tiny_model(tmp_path / "model", template=HARMONY))
    assert form is not None and (form.before, form.between) == ("to=functions.", "json")
    two = ' to=functions.weather json{"city": "Rome"}assistant to=functions.clock json{}'
    assert form.read(two) == (call(city="Rome"), call("clock"))


def test_half_a_surrogate_pair_in_a_call_is_replaced() -> None:
    (made,) = CallForm().read(r'{"name": "weather", "arguments": {"city": "\ud83d", "\udc00": "\ud83d\ude00"}}')
    assert canonical([made]) == canonical([call(city="\ufffd", **{"\ufffd": "\U0001f600"})])
    canonical([made]).encode()


@pytest.mark.parametrize("template", ["chatml", "mistral"])
def test_a_template_without_calls_has_no_form_and_its_rows_give_no_items(tmp_path: Path, template: str) -> None:
    assert CallForm.of_model(build(tmp_path / "model", template)) is None
    assert suite_items.holdout_items([row(call(city="Rome"))], calls=lambda: False) == []


def test_calls_are_compared_by_name_and_arguments_in_any_order() -> None:
    wanted = canonical([call(city="Rome", days=2), call("clock", zone="CET")])
    cases = {
        canonical([call("clock", zone="CET"), call(days=2, city="Rome")]): (1.0, 1.0, 1.0),
        canonical([call(city="Rome", days="2"), call("clock", zone="CET")]): (0.0, 1.0, 0.75),
        canonical([call(city="Rome", days=2)]): (0.0, 0.0, 0.5),
        canonical([call(city="Rome", days=2), call("clock", zone="CET"), call("clock")]): (0.0, 0.0, 2 / 3),
        "It rains.": (0.0, 0.0, 0.0),
    }
    for output, expected in cases.items():
        assert tuple(metric(output, wanted) for metric in tool_calls.METRICS.values()) == pytest.approx(expected), output


@pytest.mark.parametrize("listed", [True, False], ids=["tools in the row", "no tools in the row"])
def test_a_report_scores_calls_and_the_choice_to_call(tmp_path: Path, listed: bool) -> None:
    rows = [row(call(city=f"city {n}"), n=n) for n in range(8)] + [row(text="No tool needed.", n=9)]
    rows = [one if listed or n == 8 else {**one, "tools": []} for n, one in enumerate(rows)]
    items = suite_items.holdout_items(rows, calls=lambda: True)
    assert [item.calls for item in items].count(True) == 8
    reader = AnswerReader.of_model(build(tmp_path / "model", "qwen2_5"), mode="strip", items=items)

    def written(item: Item) -> str:
        (c,) = tool_calls.calls_of(item.expected or "") or [call(city="?")]  # the adapter calls a tool even where it should not
        return f'<tool_call>\n{{"arguments": {{"city": "{c["arguments"]["city"]}"}}, "name": "weather"}}\n</tool_call>'

    base = {**subject(items), "holdout": section({item.id: "I do not know." for item in items})}
    adapter = {**subject(items), "holdout": section({item.id: written(item) for item in items})}
    report = built(result(base, adapter), items, reader=reader)
    found = {s.metric: (s.n, s.base, s.adapter) for s in report.scores if s.suite == "holdout"}
    assert found["tool_calls"] == found["tool_names"] == found["tool_arguments"] == (8, 0.0, 1.0)
    assert found["tool_choice"] == (9, pytest.approx(1 / 9), pytest.approx(8 / 9))
    assert found["exact_match"][2] == pytest.approx(8 / 9)
    assert report.aim == "answers" and report.classification is None


def test_a_mixed_answer_with_text_and_a_call_expects_the_call() -> None:
    (item,) = suite_items.holdout_items([row(call(city="Rome"), text="<think>hm</think>One moment.")], calls=lambda: True)
    assert (item.expected, item.calls) == (canonical([call(city="Rome")]), True)
    assert "hm" in item.reasoning
