"""Calls that a template writes are read back equal, whole or in any pieces, and their markup is never content."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from engine.data.tokens.call_form import CallForm
from engine.data.tokens.chat_tokenizer import ChatTokenizer
from resources.inference.call_stream import CallReading, message_of
from tests.support.models.tool_templates import READABLE, UNREADABLE, build_tool_model

ONE_CALL = ("llama3", "public llama3_1", "public gptoss")
"""Templates that write one call a turn."""
ARGUMENTS = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=6),
    st.recursive(
        st.none() | st.booleans() | st.integers(-999, 999) | st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('abc{}"\\]', max_size=3), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)
CALLS = st.lists(st.tuples(st.from_regex("[a-zA-Z0-9_-]{1,12}", fullmatch=True), ARGUMENTS), min_size=1, max_size=3)
TEXTS = st.sampled_from(["", "Let me look.", 'I call <tool_ now: {"a": 1}', "One.\n\nTwo <"])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("forms")


@cache
def tokenizer_of(root: Path, name: str) -> ChatTokenizer:
    return ChatTokenizer.load(build_tool_model(root / name.replace(" ", "_"), {**READABLE, **UNREADABLE}[name]))


@cache
def reading_of(root: Path, name: str) -> CallReading:
    form = CallForm.of_tokenizer(tokenizer_of(root, name))
    assert form is not None and form.text is not None
    return CallReading(form=form, text=form.text, forced=False, named=False)


def generated(root: Path, name: str, calls: list[tuple[str, Any]], content: str) -> str:
    """What a model says to make `calls` after `content`."""
    tokenizer, form = tokenizer_of(root, name), reading_of(root, name).form
    tools = [
        {"type": "function", "function": {"name": n, "description": "", "parameters": {"type": "object", "properties": {}}}}
        for n, _ in calls
    ]
    ids = [f"call_{n:024d}" if form.long_ids else f"{n:09d}" for n in range(len(calls))]
    made = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, (n, a) in zip(ids, calls, strict=True)]
    turns: list[Any] = [{"role": "user", "content": "Hi"}]
    prompt = tokenizer.render_text(turns, tools=tools)
    turns.append({"role": "assistant", "content": content, "tool_calls": made})
    whole = tokenizer.render_text(turns, tools=tools, add_generation_prompt=False)
    shared = next((at for at, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), min(len(prompt), len(whole)))
    text = whole[shared:]
    for end in ("<|im_end|>", "<|eot_id|>", "<|call|>"):
        text = text.removesuffix("\n").removesuffix(end)
    return text


def message(reading: CallReading, pieces: list[str]) -> tuple[dict[str, Any], bool]:
    stream = reading.stream()
    deltas = [delta for piece in pieces for delta in stream.add(piece)] + stream.finish()
    return message_of(deltas), stream.is_complete


def values(answer: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in answer.get("tool_calls", ())]


@pytest.mark.parametrize("name", READABLE)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_rendered_calls_are_read_back_equal_however_the_text_is_cut(root: Path, name: str, data: st.DataObject) -> None:
    calls = data.draw(CALLS)[: 1 if name in ONE_CALL else 3]
    reading = reading_of(root, name)
    content = "" if reading.text.at_start or name == "public gptoss" else data.draw(TEXTS)
    text = generated(root, name, calls, content)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole, complete = message(reading, [text])
    assert complete and values(whole) == calls
    assert [(c["name"], c["arguments"]) for c in reading.form.read(text)][-len(calls) :] == calls
    said = (whole["content"] or "").rpartition("</think>")[2].strip()
    assert said == content.strip()
    for parts in (pieces, list(text)):
        again, _ = message(reading, parts)
        assert (again["content"], values(again)) == (whole["content"], calls)


@pytest.mark.parametrize("name", READABLE)
def test_call_that_is_cut_off_gives_what_was_written_and_no_markup(root: Path, name: str) -> None:
    reading = reading_of(root, name)
    text = generated(root, name, [("find_order", {"number": "A-17"})], "")
    seen = set()
    for end in range(text.index(reading.text.opening.split()[0]), len(text)):
        answer, complete = message(reading, [text[:end]])
        said = (answer["content"] or "").rpartition("</think>")[2].strip()
        assert not said or reading.text.mark.startswith(said) or reading.text.at_start, (end, answer)
        for call in answer.get("tool_calls", ()):
            assert call["function"]["name"] == "find_order" and '{"number": "A-17"}'.startswith(call["function"]["arguments"])
            seen.add(call["function"]["arguments"])
        assert complete == (bool(answer.get("tool_calls")) and call["function"]["arguments"].endswith("}"))
    assert '{"numb' in seen


def test_answer_ends_with_tool_calls_only_if_the_model_ended_complete_calls_of_its_own_choice(root: Path) -> None:
    reading = reading_of(root, "qwen2_5")
    text = generated(root, "qwen2_5", [("find_order", {"number": "A-17"})], "")
    whole, cut, named = reading.stream(), reading.stream(), replace(reading, named=True).stream()
    for stream, said in ((whole, text), (cut, text[: text.index("A-17")]), (named, text)):
        stream.add(said)
    assert [whole.finish_reason(reason) for reason in ("stop", "length")] == ["tool_calls", "length"]
    assert [cut.finish_reason(reason) for reason in ("stop", "length")] == ["stop", "length"]
    assert named.finish_reason("stop") == "stop", "the request chose the function"


def test_text_that_only_resembles_a_call_is_content_as_it_is(root: Path) -> None:
    texts = {"qwen2_5": 'a <tool_ call>  \n {"name": 1} < ', "llama3": ' {"name": "x"} ', "mistral": "[TOOL_CALL] [{}]\n"}
    for name, text in texts.items():
        for pieces in ([text], list(text)):
            assert message(reading_of(root, name), pieces) == ({"role": "assistant", "content": text}, False)


def test_white_space_in_front_of_a_call_is_no_content(root: Path) -> None:
    text = "Let me look. \n\n" + generated(root, "qwen2_5", [("find_order", {"number": "A-17"})], "")
    for pieces in ([text], list(text)):
        assert message(reading_of(root, "qwen2_5"), pieces)[0]["content"] == "Let me look."


def test_ids_have_the_form_that_the_template_takes(root: Path) -> None:
    for name, prefix, size in (("qwen2_5", "call_", 29), ("mistral", "", 9)):
        answer, _ = message(reading_of(root, name), [generated(root, name, [("a", {}), ("b", {})], "")])
        ids = [call["id"] for call in answer["tool_calls"]]
        assert len(set(ids)) == 2 and all(i.startswith(prefix) and len(i) == size and i.removeprefix("call_").isalnum() for i in ids)


@pytest.mark.parametrize("name", UNREADABLE)
def test_template_with_calls_in_xml_or_code_has_no_form(root: Path, name: str) -> None:
    tokenizer = tokenizer_of(root, name)
    assert tokenizer.tools is not None and tokenizer.tools.definitions
    assert CallForm.of_tokenizer(tokenizer) is None


def test_stop_strings_end_an_answer_in_its_content_only(root: Path) -> None:
    """However the text is cut: in front of a call, in a call, at its end, and where a call is demanded."""
    reading = reading_of(root, "qwen2_5")
    text = generated(root, "qwen2_5", [("find", {"number": "A-17"})], "One two")
    forced = replace(reading, forced=True)
    cases: list[tuple[CallReading, str, list[str], str | None, int, str]] = [
        (reading, text, ["two"], "One ", 0, "stop"),
        (reading, text, ["<", "\n", "{", '"', "tool_call", "find", "}"], "One two", 1, "tool_calls"),
        (reading, text, ["two\n<tool"], "One two", 1, "tool_calls"),
        (forced, text.removeprefix("One two").lstrip(), ["<", "find", "A-17"], None, 1, "tool_calls"),
        (reading, "a <tool_ b", ["<"], "a ", 0, "stop"),
        (reading, "One two", ["wo"], "One t", 0, "stop"),
        (reading, "One two \n", ["\n"], "One two ", 0, "stop"),
        (reading, "One tw", ["two"], "One tw", 0, "length"),
    ]
    for read, said, stops, content, num_calls, reason in cases:
        for pieces in ([said], list(said)):
            stream = read.stream(stops)
            deltas = [delta for piece in pieces for delta in stream.add(piece)] + stream.finish()
            found = message_of(deltas)
            ended = stream.finish_reason("stop" if num_calls else "length")
            assert (found["content"], len(found.get("tool_calls", ())), ended) == (content, num_calls, reason), (said, stops, pieces)
