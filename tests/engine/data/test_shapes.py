"""Each accepted row shape becomes the example that it means, says why it was read so, and is refused with the way out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from engine.data import shapes
from engine.data.checks.turn_order import order_problems
from engine.data.fields import MAX_MESSAGES, MAX_PROBLEMS
from engine.data.pipeline.block_reader import chat_reader
from engine.data.readers.column_map import apply_map
from engine.data.schema import Example, Message, ToolCall, canonical, parse_canonical
from tests.engine.data.examples_of import chat

WEATHER = {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": WEATHER}
LONG_SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"description": "x" * 70_000}}}


def read(value: dict[str, Any]) -> Example:
    found = shapes.detect_shape(value)
    assert found is not None
    example, problems = shapes.to_example(value, found[0], row=1)
    assert problems == []
    assert example is not None
    assert list(order_problems(example)) == []
    assert parse_canonical(canonical(example), row=1) == example
    return example


def refused(value: dict[str, Any]) -> list[tuple[str, str]]:
    found = shapes.detect_shape(value)
    assert found is not None
    example, problems = shapes.to_example(value, found[0], row=1)
    assert example is None
    assert all(p.message and p.fix for p in problems)
    return [(p.path, p.code) for p in problems]


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str, weight: int = 1) -> Message:
    return Message(role="assistant", content=text, weight=weight)


CALLED = (
    user("Rain?"),
    Message(role="assistant", tool_calls=(ToolCall(name="weather", arguments={"city": "Oslo"}, id="c1"),)),
    Message(role="tool", content="yes", tool_call_id="c1"),
    assistant("Yes"),
)
QA = {"prompt": "a", "completion": "b"}
PROMPT = [{"role": "user", "content": "q"}]

SHAPES: dict[str, tuple[dict[str, Any], str, str, Example]] = {
    "chat": (chat("a", "b"), "chat", "messages", Example(kind="chat", messages=(user("a"), assistant("b")))),
    "chat with weights, a developer message and content parts": (
        {
            "messages": [
                {"role": "developer", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]},
                {"role": "assistant", "content": "c", "weight": 0.0},
                {"role": "user", "content": "d", "name": "Ann"},
                {"role": "assistant", "content": "e", "weight": 1},
            ],
            "parallel_tool_calls": False,
        },
        "chat",
        "messages",
        Example(
            kind="chat",
            messages=(
                Message(role="system", content="s"),
                user("ab"),
                assistant("c", 0),
                Message(role="user", content="d", name="Ann"),
                assistant("e"),
            ),
        ),
    ),
    "tool calls": (
        {
            "messages": [
                {"role": "user", "content": "Rain?"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}],
                },
                {"role": "tool", "content": "yes", "tool_call_id": "c1"},
                {"role": "assistant", "content": "Yes"},
            ],
            "tools": [TOOL],
            "parallel_tool_calls": True,
        },
        "chat",
        "messages",
        Example(kind="chat", messages=CALLED, tools=(TOOL,)),
    ),
    "tools as JSON text, as columns of Parquet hold them": (
        {**chat("a", "b"), "tools": json.dumps([TOOL])},
        "chat",
        "messages",
        Example(kind="chat", messages=(user("a"), assistant("b")), tools=(TOOL,)),
    ),
    "function calls of the older kind": (
        {
            "messages": [
                {"role": "user", "content": "Rain?"},
                {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
                {"role": "function", "name": "weather", "content": "yes"},
                {"role": "assistant", "content": "Yes"},
            ],
            "functions": [WEATHER],
        },
        "chat",
        "messages",
        Example(
            kind="chat",
            messages=(
                user("Rain?"),
                Message(role="assistant", tool_calls=(ToolCall(name="weather", arguments={"city": "Oslo"}),)),
                Message(role="tool", content="yes", name="weather"),
                assistant("Yes"),
            ),
            tools=(TOOL,),
        ),
    ),
    "ShareGPT": (
        {
            "conversations": [
                {"from": "human", "value": "Rain?"},
                {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
                {"from": "observation", "value": "yes"},
                {"from": "gpt", "value": "Yes", "weight": 0},
                {"from": "human", "value": "Sure?"},
                {"from": "gpt", "value": "Yes"},
            ],
            "system": "s",
        },
        "chat",
        "ShareGPT",
        Example(
            kind="chat",
            messages=(
                Message(role="system", content="s"),
                user("Rain?"),
                Message(role="assistant", tool_calls=(ToolCall(name="weather", arguments={"city": "Oslo"}),)),
                Message(role="tool", content="yes"),
                assistant("Yes", 0),
                user("Sure?"),
                assistant("Yes"),
            ),
        ),
    ),
    "prompt and completion": (QA, "prompt_completion", "completion", Example(kind="chat", messages=(user("a"), assistant("b")))),
    "a prompt of messages with an answer in it": (
        {"prompt": [*chat("a", "b")["messages"], {"role": "user", "content": "c"}], "completion": [{"role": "assistant", "content": "d"}]},
        "prompt_completion",
        "completion",
        Example(kind="chat", messages=(user("a"), assistant("b", 0), user("c"), assistant("d"))),
    ),
    "Alpaca": (
        {"instruction": "Add", "input": "1 2", "output": "3", "history": [["x", "y"]]},
        "prompt_completion",
        "Alpaca",
        Example(kind="chat", messages=(user("x"), assistant("y", 0), user("Add\n\n1 2"), assistant("3"))),
    ),
    "Alpaca without input, with its rendered text beside it": (
        {"instruction": "Say hi", "input": "", "output": "hi", "text": "Below is an instruction ..."},
        "prompt_completion",
        "Alpaca",
        Example(kind="chat", messages=(user("Say hi"), assistant("hi"))),
    ),
    "KTO": (
        {**QA, "label": False},
        "kto",
        "label",
        Example(kind="kto", messages=(user("a"), assistant("b")), label=False),
    ),
    "KTO of a CSV": ({**QA, "label": "True"}, "kto", "label", Example(kind="kto", messages=(user("a"), assistant("b")), label=True)),
    "a good answer labeled with a word": (
        {**QA, "label": "Thumbs up"},
        "kto",
        "label",
        Example(kind="kto", messages=(user("a"), assistant("b")), label=True),
    ),
    "preference": (
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        "preference",
        "chosen",
        Example(kind="preference", messages=(user("q"),), chosen=(assistant("a"),), rejected=(assistant("b"),)),
    ),
    "preference whose answers repeat the prompt, with a copy as messages": (
        {
            "prompt": "q",
            "chosen": chat("q", "a")["messages"],
            "rejected": chat("q", "b")["messages"],
            "messages": chat("q", "a")["messages"],
        },
        "preference",
        "chosen",
        Example(kind="preference", messages=(user("q"),), chosen=(assistant("a"),), rejected=(assistant("b"),)),
    ),
    "preference of whole conversations": (
        {"chosen": chat("q", "a")["messages"], "rejected": chat("q", "b")["messages"]},
        "preference",
        "chosen",
        Example(kind="preference", messages=(user("q"),), chosen=(assistant("a"),), rejected=(assistant("b"),)),
    ),
    "OpenAI's preference with tools": (
        {
            "input": {"messages": PROMPT, "tools": [TOOL], "parallel_tool_calls": True},
            "preferred_output": [{"role": "assistant", "content": "a"}],
            "non_preferred_output": [{"role": "assistant", "content": "b"}],
        },
        "preference",
        "preferred_output",
        Example(kind="preference", messages=(user("q"),), chosen=(assistant("a"),), rejected=(assistant("b"),), tools=(TOOL,)),
    ),
    "preference of which one answer goes on where the other ends": (
        {"chosen": chat("q", "a")["messages"], "rejected": chat("q", "a")["messages"] + chat("r", "b")["messages"]},
        "preference",
        "chosen",
        Example(kind="preference", messages=(user("q"),), chosen=(assistant("a"),), rejected=(assistant("a"), user("r"), assistant("b"))),
    ),
    "preference of which one answer repeats the prompt": (
        {"prompt": "q", "chosen": chat("q", "a")["messages"], "rejected": "b"},
        "preference",
        "chosen",
        Example(kind="preference", messages=(user("q"),), chosen=(assistant("a"),), rejected=(assistant("b"),)),
    ),
    "preference with the form of its answers": (
        {"prompt": "q", "chosen": "a", "rejected": "b", "response_format": {"type": "json_object"}},
        "preference",
        "chosen",
        Example(
            kind="preference",
            messages=(user("q"),),
            chosen=(assistant("a"),),
            rejected=(assistant("b"),),
            response_format={"type": "json_object"},
        ),
    ),
    "Alpaca with an input of white space": (
        {"instruction": "a", "input": " \n", "output": "b"},
        "prompt_completion",
        "Alpaca",
        Example(kind="chat", messages=(user("a"), assistant("b"))),
    ),
    "chat with an empty system prompt beside it": (
        {**chat("a", "b"), "system": ""},
        "chat",
        "messages",
        Example(kind="chat", messages=(user("a"), assistant("b"))),
    ),
    "text": ({"text": "abc"}, "text", "text", Example(kind="text", text="abc")),
}


@pytest.mark.parametrize("case", SHAPES)
def test_a_row_becomes_the_example_that_it_means(case: str) -> None:
    value, fmt, reason, wanted = SHAPES[case]
    found = shapes.detect_shape(value)
    assert found is not None
    assert found[0] == fmt
    assert reason in found[1], "the format explains itself"
    example = read(value)
    assert parse_canonical(canonical(example)) == wanted


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "an unknown ShareGPT role": ({"conversations": [{"from": "alien", "value": "x"}]}, ("conversations[0].from", "invalid_role")),
    "a ShareGPT turn without text": ({"conversations": [{"from": "human"}]}, ("conversations[0].value", "missing_field")),
    "a ShareGPT call that is no JSON": (
        {"conversations": [{"from": "function_call", "value": "weather()"}]},
        ("conversations[0].value", "invalid_tool_call"),
    ),
    "conversations that are text": ({"conversations": "x"}, ("conversations", "wrong_type")),
    "an instruction that is a number": ({"instruction": 1, "output": "x"}, ("instruction", "wrong_type")),
    "history of single texts": ({"instruction": "a", "output": "x", "history": ["a"]}, ("history[0]", "wrong_type")),
    "a legacy call without a name": (
        {"messages": [{"role": "assistant", "function_call": {"arguments": "{}"}}]},
        ("messages[0].function_call", "invalid_tool_call"),
    ),
    "tools that are an object": ({**chat("a", "b"), "tools": {"name": "x"}}, ("tools", "wrong_type")),
    "tools that are no JSON": ({**chat("a", "b"), "tools": "x"}, ("tools", "wrong_type")),
    "tools of a preference": (
        {"input": {"messages": PROMPT, "tools": 1}, "preferred_output": [], "non_preferred_output": []}, ("input.tools", "wrong_type")),
    "a label that judges nothing": ({**QA, "label": "billing"}, ("label", "invalid_label")),
    "parallel_tool_calls that is text": ({**chat("a", "b"), "parallel_tool_calls": "maybe"}, ("parallel_tool_calls", "wrong_type")),
    "a huge weight": (
        {"messages": [{"role": "user", "content": "x", "weight": 10**400}]},
        ("messages[0].weight", "invalid_weight"),
    ),
    "a weight that is a list": ({"messages": [{"role": "user", "content": "x", "weight": [1]}]}, ("messages[0].weight", "invalid_weight")),
    "a weight that is true": ({"messages": [{"role": "user", "content": "x", "weight": True}]}, ("messages[0].weight", "invalid_weight")),
    "two answers about thinking": (
        {**chat("a", "b"), "enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
        ("enable_thinking", "invalid_template_kwargs"),
    ),
    "reasoning of a user": (
        {"messages": [{"role": "user", "content": "x", "reasoning_content": "y"}]},
        ("messages[0].reasoning_content", "invalid_reasoning"),
    ),
    "a preference that asks nothing": ({"chosen": "a", "rejected": "b"}, ("prompt", "missing_field")),
    "one answer of two": (
        {"input": {"messages": PROMPT}, "preferred_output": PROMPT}, ("non_preferred_output", "missing_field")),
    "a system prompt that is a list": ({**chat("a", "b"), "system": []}, ("system", "wrong_type")),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_row_that_is_wrong_is_refused_with_the_place(case: str) -> None:
    value, problem = REFUSED[case]
    assert problem in refused(value)


UNKNOWN = [
    ({"question": "a", "answer": "b"}, "--map question=prompt,answer=completion"),
    ({"query": "a", "response": "b", "id": "7"}, "--map query=prompt,response=completion"),
    ({"utterance": "a", "intent": "b"}, "--map utterance=prompt,intent=completion"),
    ({"question": "a", "ground_truth": "b"}, "--map question=prompt,ground_truth=completion"),
    ({"Frage": "a", "Antwort": "b"}, "--map Frage=prompt,Antwort=completion"),
    ({"antwort": "b", "frage": "a"}, "--map frage=prompt,antwort=completion"),
    ({"Question": "a", "R\u00e9ponse": "b"}, "--map 'Question=prompt,R\u00e9ponse=completion'"),
    ({"x": "a", "y": "b"}, "--map x=prompt,y=completion"),
    ({"id": "1", "note": "a", "body": "a long text", "question": "b"}, "--map question=prompt,body=completion"),
    ({"short": "a", "first": "a long text", "second": "a longer text"}, "--map first=prompt,second=completion"),
    ({"my question": "a", "my answer": "b"}, "--map 'my question=prompt,my answer=completion'"),
    ({"dialog": [{"role": "user", "content": "a"}], "a": "b", "c": "d"}, "--map dialog=messages"),
    ({"a": "b", "c": "d", "dialog": '[{"role": "user", "content": "a"}]'}, "--map dialog=messages"),
    ({"a": "[1]", "c": "[{"}, "--map a=prompt,c=completion"),
    ({"x": "a"}, "rename the fields, or map columns as in --map text=prompt,category=completion"),
    ({"a,b": "a", "c": "b"}, "rename the fields, or map columns as in --map text=prompt,category=completion"),
    ({"question": 1, "answer": 2}, "rename the fields, or map columns as in --map text=prompt,category=completion"),
    ({}, "rename the fields, or map columns as in --map text=prompt,category=completion"),
]


@pytest.mark.parametrize(("value", "fix"), UNKNOWN)
def test_an_unknown_shape_says_how_to_map_it(value: dict[str, Any], fix: str) -> None:
    assert shapes.detect_shape(value) is None
    problem = shapes.unknown_shape(value)
    assert (problem.code, problem.fix.removeprefix("map the columns: ")) == ("unknown_row_shape", fix)


def test_a_preference_with_a_question_says_how_to_map_it() -> None:
    value = {"question": "q", "chosen": "a", "rejected": "b"}
    _, problems = shapes.to_example(value, "preference", row=1)
    assert [p.fix for p in problems] == ["map it: --map question=prompt,chosen=chosen,rejected=rejected"]


def test_a_text_column_that_nothing_reads_is_pointed_out() -> None:
    found = shapes.detect_shape({"text": "How?", "category": "card"})
    assert found == ("text", "rows have 'text', and 'category' is read by nothing")
    code, message = shapes.advice({"text": "How?", "category": "card"}) or ("", "")
    assert code == "unread_text_column"
    assert "--map text=prompt,category=completion" in message
    assert shapes.advice({"text": "How?"}) is None
    assert shapes.advice({"text": "How?", "a": "x", "b": "y"}) is None, "which of two it is, nobody knows"
    assert shapes.advice({"text": "How?", **chat("a", "b")}) is None
    mapped = apply_map({"text": "How?", "category": "card"}, {"text": "text"}, True)
    assert isinstance(mapped, dict)
    assert shapes.advice(mapped) is None


def test_fields_that_nothing_reads_are_named_and_empty_ones_are_not() -> None:
    row = {**chat("a", "b"), "id": 7, "score": None}
    row["messages"][0] |= {"mood": "good", "name": None}
    assert sorted(shapes.unknown_fields(row, "chat")) == ["id", "messages[].mood"]
    row = {"conversations": [{"from": "human", "value": "a", "x": 1}], "source": "s"}
    assert sorted(shapes.unknown_fields(row, "chat")) == ["conversations[].x", "source"]


GOOD_TURN = {"role": "user", "content": "x"}
TOO_MANY: dict[str, tuple[dict[str, Any], str]] = {
    "messages": ({"messages": [GOOD_TURN] * (MAX_MESSAGES + 1)}, "messages"),
    "bad messages": ({"messages": [{}] * (MAX_MESSAGES + 1)}, "messages"),
    "messages of a prompt": ({"prompt": [GOOD_TURN] * (MAX_MESSAGES + 1), "completion": "b"}, "prompt"),
    "messages of ShareGPT": ({"conversations": [{"from": "human", "value": "x"}] * (MAX_MESSAGES + 1)}, "conversations"),
    "history": ({"instruction": "a", "output": "b", "history": [["a", "b"]] * (MAX_MESSAGES // 2 + 1)}, "history"),
}


@pytest.mark.parametrize("case", TOO_MANY)
def test_a_conversation_of_too_many_messages_is_one_problem(case: str) -> None:
    value, path = TOO_MANY[case]
    found = shapes.detect_shape(value)
    assert found is not None
    example, problems = shapes.to_example(value, found[0], row=1)
    assert example is None
    assert [(p.code, p.path) for p in problems] == [("too_many_messages", path)]


def test_a_conversation_of_as_many_messages_as_there_may_be_is_read() -> None:
    example, problems = shapes.to_example({"messages": [GOOD_TURN] * MAX_MESSAGES}, "chat", row=1)
    assert problems == []
    assert example is not None
    assert len(example.messages) == MAX_MESSAGES


class Counted(list[Any]):
    """A list that counts how many of its items have been looked at."""

    looked_at = 0

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            self.looked_at += 1
            yield item


@pytest.mark.parametrize(
    ("item", "per_item"), [({}, 2), ("x", 1), ({"role": "bot", "content": 5, "weight": 7}, 3), ({"role": "user", "content": [5]}, 1)]
)
def test_a_row_of_problems_names_the_first_hundred_and_is_read_no_further(item: Any, per_item: int) -> None:
    messages = Counted([item] * 9_000)
    example, problems = shapes.to_example({"messages": messages}, "chat", row=1)
    assert example is None
    assert len(problems) == MAX_PROBLEMS + 1
    assert [p.code for p in problems].index("more_problems") == MAX_PROBLEMS
    assert messages.looked_at <= MAX_PROBLEMS // per_item + 1


def test_a_row_of_exactly_a_hundred_problems_has_no_more() -> None:
    _, problems = shapes.to_example({"messages": ["x"] * MAX_PROBLEMS}, "chat", row=1)
    assert [p.code for p in problems] == ["wrong_type"] * MAX_PROBLEMS


def test_content_of_a_million_parts_that_are_wrong_is_read_no_further() -> None:
    parts = Counted([5] * 1_000_000)
    _, problems = shapes.to_example({"messages": [{"role": "user", "content": parts}]}, "chat", row=1)
    assert problems[-1].code == "more_problems"
    assert parts.looked_at == MAX_PROBLEMS + 1


def test_both_ways_of_reading_a_line_agree_on_how_many_messages_there_may_be() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * (MAX_MESSAGES // 2)
    read = chat_reader((), Counter())
    assert read(json.dumps({"messages": turns}).encode(), 1) is not None
    assert read(json.dumps({"messages": [turns[0], *turns]}).encode(), 1) is None


def sharegpt(*said: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": role, "value": text} for role, text in said]


GOOD_SIDE, BAD_SIDE = {"from": "gpt", "value": "good"}, {"from": "gpt", "value": "bad"}
LLAMA_FACTORY = {
    "a conversation": {"conversations": sharegpt(("human", "q")), "chosen": GOOD_SIDE, "rejected": BAD_SIDE},
    "a conversation with system": {"conversations": sharegpt(("human", "q")), "system": "s", "chosen": GOOD_SIDE, "rejected": BAD_SIDE},
    "OpenAI's messages": {
        "messages": [{"role": "user", "content": "q"}],
        "chosen": {"role": "assistant", "content": "good"},
        "rejected": {"role": "assistant", "content": "bad"},
    },
    "an instruction": {"instruction": "q", "input": "", "chosen": "good", "rejected": "bad"},
    "an instruction with input": {"instruction": "q", "input": "more", "chosen": "good", "rejected": "bad"},
}


@pytest.mark.parametrize("case", LLAMA_FACTORY)
def test_preferences_of_llama_factory_are_read(case: str) -> None:
    row = LLAMA_FACTORY[case]
    assert (shapes.detect_shape(row) or ("",))[0] == "preference"
    example, problems = shapes.to_example(row, "preference", row=1)
    assert problems == []
    assert example is not None
    asked = "q\n\nmore" if "more" in json.dumps(row) else "q"
    system = [("system", "s")] if "system" in case else []
    assert [(m.role, m.content) for m in example.messages] == [*system, ("user", asked)]
    assert [(m.role, m.content) for m in (*example.chosen, *example.rejected)] == [("assistant", "good"), ("assistant", "bad")]
    assert shapes.unknown_fields(row, "preference") == []


def test_a_conversation_that_is_answered_already_is_no_prompt_of_a_preference() -> None:
    asked, good, bad = ({"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "good"), ("assistant", "bad")))
    example, problems = shapes.to_example(
        {"messages": [asked, good], "chosen": [asked, good], "rejected": [asked, bad]}, "preference", row=1
    )
    assert problems == []
    assert example is not None
    assert [[m.content for m in side] for side in (example.messages, example.chosen, example.rejected)] == [["q"], ["good"], ["bad"]]


@pytest.mark.parametrize("form", [{"type": "xml"}, {"type": "json_schema"}, "[]", LONG_SCHEMA])
def test_a_response_format_of_another_form_is_a_problem_of_its_row(form: Any) -> None:
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "response_format": form}
    assert [p.code for p in shapes.to_example(row, "chat", row=1)[1]] == ["invalid_response_format"]
