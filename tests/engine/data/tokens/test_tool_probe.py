"""Rows whose tools, calls or results a template leaves out are refused, before and in the pack, and never called valid."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.errors import InvalidDataset, InvalidRequest
from engine.data.checks.tool_usage import tools_problem
from engine.data.conversation import read_conversation
from engine.data.ingest import Policies, validate_file
from engine.data.packs.build import PackSettings, build_pack
from engine.data.row_preview import preview
from engine.data.shapes import to_example
from engine.data.stored_rows import load_rows
from engine.data.tokens.chat_tokenizer import ChatTokenizer
from engine.data.tokens.templates import load_template
from engine.data.tokens.tool_probe import TemplateTools, template_tools
from tests.engine.data.tokens.test_templates import TEMPLATES, build
from tests.engine.data.tokens.test_tokens import TOOLS_TEMPLATE, with_template

USER = {"role": "user", "content": "Weather in Lima?"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}


def called(*cities: str, content: str | None = None) -> dict[str, Any]:
    calls = [
        {"id": f"call0000{n}", "type": "function", "function": {"name": "weather", "arguments": {"city": c}}} for n, c in enumerate(cities)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


RESULT = {"role": "tool", "tool_call_id": "call00000", "content": "rain"}
PLAIN = {"messages": [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello."}]}
OFFER = {"messages": [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A clerk."}], "tools": [TOOL]}
CALL = {"messages": [USER, called("Lima")]}
PARALLEL = {"messages": [USER, called("Lima", "Oslo")]}
SAID = {"messages": [USER, called("Lima", content="Let me look.")]}
TOLD = {"messages": [USER, called("Lima"), RESULT, {"role": "assistant", "content": "It rains."}]}
ROWS = {"offer": OFFER, "call": CALL, "parallel": PARALLEL, "said": SAID, "told": TOLD}

WRITE_CALL = "call.function.name + ' ' + (call.function.arguments | tojson)"
CHANGES: dict[str, tuple[str, str, set[str]]] = {
    "nothing": ("", "", set()),
    "the tools": ("tools | tojson", "'some tools'", {"offer"}),
    "the names of tools alone": ("(tools | tojson)", "(tools | map(attribute='function.name') | join(' '))", {"offer"}),
    "all calls": (WRITE_CALL, "''", {"call", "parallel", "said", "told"}),
    "the arguments": (WRITE_CALL, "call.function.name", {"call", "parallel", "said", "told"}),
    "the values of arguments": (
        WRITE_CALL,
        "call.function.name ~ (call.function.arguments | length)",
        {"call", "parallel", "said", "told"},
    ),
    "the names of calls": (WRITE_CALL, "(call.function.arguments | tojson)", {"call", "parallel", "said", "told"}),
    "all calls but the first": ("in message.tool_calls or []", "in (message.tool_calls or [])[:1]", {"parallel"}),
    "content beside calls": ("{{- message.content or '' }}", "{{- '' if message.tool_calls else message.content }}", {"said"}),
    "results": ("message.content + '<|im_end|>", "('' if message.role == 'tool' else message.content) + '<|im_end|>", {"told"}),
}
CALLS = """            {%- for call in message.tool_calls or [] %}
                {{- '\\n' + call.function.name + ' ' + (call.function.arguments | tojson) }}
            {%- endfor %}
"""


def changed(name: str) -> str:
    old, new, _ = CHANGES[name]
    assert old in TOOLS_TEMPLATE
    return TOOLS_TEMPLATE.replace(old, new) if old else TOOLS_TEMPLATE


SHORT = (
    "{{% for m in messages %}}{{{{ '<|im_start|>' + m.role + '\\n' + {} + '<|im_end|>' }}}}{{% endfor %}}"
    "{{% if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n' }}}}{{% endif %}}"
)
"""A template that writes an expression for each content."""


def code_of(tokenizer: ChatTokenizer, row: dict[str, Any]) -> str:
    """Code with which the row is refused; empty if it is trained."""
    example, problems = to_example(row, "chat", row=1)
    assert example is not None, problems
    try:
        encoded = tokenizer.encode(example, max_seq_len=10**6)
    except InvalidDataset as error:
        return error.code
    return "" if encoded.num_trained_tokens > 1 else "nothing is trained"


def refused(tokenizer: ChatTokenizer) -> set[str]:
    return {name for name, row in ROWS.items() if code_of(tokenizer, row) in ("tools_not_rendered", "answer_not_rendered")}


@pytest.mark.parametrize("name", CHANGES)
def test_rows_are_refused_for_the_part_that_a_template_leaves_out(merging_model: Path, tmp_path: Path, name: str) -> None:
    tokenizer = ChatTokenizer.load(with_template(merging_model, tmp_path / "model", changed(name)))
    assert refused(tokenizer) == CHANGES[name][2]


def test_calls_outside_of_what_is_trained_are_refused(merging_model: Path, tmp_path: Path) -> None:
    ended = "            {{- '<|im_end|>' }}\n        {%- endgeneration %}\n"
    assert CALLS + ended in TOOLS_TEMPLATE
    template = TOOLS_TEMPLATE.replace(CALLS + ended, f"{ended}{CALLS}")
    tokenizer = ChatTokenizer.load(with_template(merging_model, tmp_path / "model", template))
    assert refused(tokenizer) == {"call", "parallel", "said", "told"}


FACTS = {
    "chatml": (False, False, True), "chatml_marked": (False, False, True), "llama3": (True, True, True),
    "llama3_marked": (False, False, True), "mistral": (False, False, None), "mistral_marked": (False, False, None),
    "qwen2_5": (True, True, True), "qwen3": (True, True, True),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(p.stem for p in TEMPLATES.glob("*.jinja")))
def test_facts_of_public_templates(name: str, tmp_path: Path) -> None:
    template = load_template(build(tmp_path / name, name))
    assert template is not None
    facts = template_tools(template)
    assert (facts.definitions, facts.calls, facts.results) == FACTS[name]


def test_report_names_counts_rows_and_a_way_out(tiny_model: Path, tmp_path: Path, jsonl: Callable[..., Path]) -> None:
    file, few = jsonl(PLAIN, CALL, TOLD, OFFER), Policies(min_examples=1)
    report = validate_file(file, filename="r.jsonl", policies=few, model_dir=tiny_model, max_seq_len=400).report
    assert not report.valid and report.error_counts == {"tools_not_rendered": 3}
    assert [(e.row, e.code) for e in report.errors] == [(2, "tools_not_rendered"), (3, "tools_not_rendered"), (4, "tools_not_rendered")]
    assert "arguments of its tool calls" in report.errors[0].message and "Qwen" in report.errors[0].fix
    assert report.stats["tools"]["template"] == {"definitions": False, "calls": False, "results": True}

    unnamed = validate_file(file, filename="r.jsonl", policies=few, output=tmp_path / "rows.parquet").report
    assert unnamed.valid
    assert unnamed.stats["tools"] == {
        "definitions": {"count": 1, "first": [4]}, "calls": {"count": 2, "first": [2, 3]}, "results": {"count": 1, "first": [3]},
        "template": None,
    }  # fmt: skip
    (warning,) = [w["message"] for w in unnamed.warnings if w["code"] == "tools_not_checked"]
    assert warning.startswith("1 rows offer tools, 2 call them and 1 have results")

    tokenizer = ChatTokenizer.load(tiny_model)
    with pytest.raises(InvalidDataset, match=r"3 examples do not fit the base model \(rows 2, 3, 4\)") as found:
        build_pack(tmp_path / "rows.parquet", tokenizer, PackSettings(max_seq_len=400), tmp_path / "fail", dataset_id="ds")
    assert found.value.code == "tools_not_rendered"
    kept = build_pack(
        tmp_path / "rows.parquet", tokenizer, PackSettings(max_seq_len=400, bad_rows="drop"), tmp_path / "drop", dataset_id="ds"
    )
    assert (kept.num_examples, kept.dropped) == (1, {"tools_not_rendered": 3})
    with pytest.raises(InvalidDataset, match=r"row 2: .*leaves out the names of its tool calls and the arguments"):
        preview(load_rows(tmp_path / "rows.parquet"), tokenizer, max_seq_len=400)


def test_answers_that_a_template_does_not_tell_apart_are_refused(tiny_model: Path, tmp_path: Path, jsonl: Callable[..., Path]) -> None:
    model = with_template(tiny_model, tmp_path / "model", SHORT.format("(m.content if m.role == 'user' else 'ok')"))
    report = validate_file(jsonl(PLAIN), filename="r.jsonl", policies=Policies(min_examples=1), model_dir=model, max_seq_len=400).report
    assert not report.valid and report.error_counts == {"answer_not_rendered": 1}


def test_row_whose_answer_would_be_blank_is_refused(tiny_model: Path, tmp_path: Path, jsonl: Callable[..., Path]) -> None:
    model = with_template(tiny_model, tmp_path / "model", SHORT.format("m.content.split('#')[0]"))
    rows = [{"messages": [USER, {"role": "assistant", "content": text}]} for text in ("fine", "#cut")]
    report = validate_file(jsonl(*rows), filename="r.jsonl", policies=Policies(min_examples=1), model_dir=model, max_seq_len=400).report
    assert [(e.row, e.code) for e in report.errors] == [(2, "answer_not_rendered")]


@pytest.mark.parametrize(("more", "message"), [({"tools": [TOOL]}, USER), ({}, called("Lima"))])
def test_request_with_tools_that_the_template_leaves_out_is_refused(tokenizer: ChatTokenizer, more: Any, message: Any) -> None:
    with pytest.raises(InvalidRequest) as found:
        tokenizer.encode_prompt(read_conversation([USER, message, USER], **more))
    assert found.value.code == "tools_not_rendered"


def test_each_shape_of_conversation_is_probed(merging_model: Path, tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.load(with_template(merging_model, tmp_path / "model", changed("all calls but the first")))
    codes = [code_of(tokenizer, row) for row in (CALL, PARALLEL, CALL, PARALLEL)]
    assert codes == ["", "tools_not_rendered", "", "tools_not_rendered"]


def test_content_and_calls_that_are_left_out_together_are_both_named(merging_model: Path, tmp_path: Path) -> None:
    template = changed("all calls").replace("{{- message.content or '' }}", "{{- '' if message.tool_calls else message.content }}")
    tokenizer = ChatTokenizer.load(with_template(merging_model, tmp_path / "model", template))
    example, _ = to_example(SAID, "chat", row=1)
    assert example is not None
    with pytest.raises(InvalidDataset, match=r"names of its tool calls and .* and the content of an answer") as found:
        tokenizer.encode(example, max_seq_len=10**6)
    assert found.value.code == "tools_not_rendered"


def test_variables_of_the_template_are_probed_apart(merging_model: Path, tmp_path: Path) -> None:
    template = TOOLS_TEMPLATE.replace("{%- if tools %}", "{%- if tools and enable_thinking is not false %}")
    tokenizer = ChatTokenizer.load(with_template(merging_model, tmp_path / "model", template))
    rows = [{**OFFER, "enable_thinking": thinking} for thinking in (True, False)]
    assert [code_of(tokenizer, row) for row in rows * 2] == ["", "tools_not_rendered"] * 2


def test_answers_with_and_without_loss_are_probed_apart(merging_model: Path, tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.load(with_template(merging_model, tmp_path / "model", changed("content beside calls")))
    quiet = {**called("Lima", content="Let me look."), "weight": 0}
    end = [RESULT, {"role": "assistant", "content": "It rains."}]
    rows = [{"messages": [USER, quiet, *end]}, {"messages": [USER, {**quiet, "weight": 1}, *end]}]
    assert [code_of(tokenizer, row) for row in rows * 2] == ["", "answer_not_rendered"] * 2


def test_answers_that_a_template_leaves_out_once_more_messages_follow_are_not_refused(merging_model: Path, tmp_path: Path) -> None:
    template = TOOLS_TEMPLATE.replace("{{- message.content or '' }}", "{{- message.content if loop.last else '' }}")
    tokenizer = ChatTokenizer.load(with_template(merging_model, tmp_path / "model", template))
    assert code_of(tokenizer, {**OFFER, "messages": [*OFFER["messages"], *OFFER["messages"]]}) == ""


def test_tools_with_and_without_parameters_are_probed_apart(merging_model: Path, tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.load(with_template(merging_model, tmp_path / "model", changed("the names of tools alone")))
    bare = {**OFFER, "tools": [{"type": "function", "function": {"name": "now"}}]}
    assert [code_of(tokenizer, row) for row in (bare, OFFER, bare, OFFER)] == ["", "tools_not_rendered", "", "tools_not_rendered"]


def test_a_refused_conversation_does_not_vouch_for_others_of_its_shape(merging_model: Path, tmp_path: Path) -> None:
    strict = "{%- if 'Oslo' in messages[0].content %}{{ raise_exception('not Oslo') }}{%- endif %}"
    tokenizer = ChatTokenizer.load(with_template(merging_model, tmp_path / "model", strict + changed("all calls")))
    oslo = {"messages": [{"role": "user", "content": "Weather in Oslo?"}, called("Oslo")]}
    assert [code_of(tokenizer, row) for row in (oslo, CALL)] == ["template_refused", "tools_not_rendered"]


def test_parts_that_a_template_refuses_are_not_reported_as_left_out() -> None:
    counted = {"definitions": {"count": 0, "first": []}, "calls": {"count": 0, "first": []}, "results": {"count": 1, "first": [3]}}
    assert tools_problem({"tools": counted}, TemplateTools(definitions=True, calls=True, results=None)) is None
    problem = tools_problem({"tools": counted}, TemplateTools(definitions=True, calls=True, results=False))
    assert problem is not None and "leaves out the content of its tool messages of 1 row (3)" in problem
