"""Tools on the embedded server, as OpenAI's client uses them: chosen, demanded, streamed, constrained, or refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.support.models.tiny_model import build_tiny_model
from tests.support.models.tool_templates import READABLE, UNREADABLE, build_tool_model
from tests.support.servers.inference_server import TOKEN, free_port, inference_server

CITY = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", "F"]},
        "city": {"type": "string", "maxLength": 8, "pattern": "^[A-Z][a-z]+$"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["unit", "city", "days"],
    "additionalProperties": False,
}
LAMP = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}
SCHEMAS: dict[str, Any] = {"weather": CITY, "lamp": LAMP, "lamp_all": LAMP, "now": {"type": "object", "maxProperties": 0}}
TOOLS: Any = [{"type": "function", "function": {"name": n, "description": n, "parameters": s}} for n, s in SCHEMAS.items() if n != "now"]
TOOLS.append({"type": "function", "function": {"name": "now", "description": "now"}})
FAMILIES = ("qwen2_5", "llama3", "public gptoss", "mistral", "deepseek", "granite")
"""Each with another form of calls; the rest of the templates differ in prompts."""


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, openai.OpenAI]]:
    root = tmp_path_factory.mktemp("tools")

    class Started(dict[str, openai.OpenAI]):
        """Starts a server for a template when it is first used."""

        def __missing__(self, name: str) -> openai.OpenAI:
            template = {**READABLE, **UNREADABLE}[name]
            server = inference_server(build_tool_model(root / name.replace(" ", "_"), template), port=free_port())
            servers.append(server)
            self[name] = openai.OpenAI(base_url=f"{server.__enter__()}/v1", api_key=TOKEN, max_retries=0)
            return self[name]

    servers: list[Any] = []
    made = Started()
    try:
        yield made
    finally:
        for client in made.values():
            client.close()
        for server in servers:
            server.__exit__(None, None, None)


def create(client: openai.OpenAI, **options: Any) -> Any:
    settings = {
        "temperature": 1.0,
        "seed": 3,
        "max_tokens": 300,
        "tools": TOOLS,
        "messages": [{"role": "user", "content": "Hi"}],
        **options,
    }
    return client.chat.completions.create(model="tiny", **settings)


def check_calls(message: Any) -> None:
    for call in message.tool_calls:
        arguments = json.loads(call.function.arguments)
        jsonschema.validate(arguments, SCHEMAS[call.function.name])
        assert [key for key in CITY["properties"] if key in arguments] == [key for key in arguments if key in CITY["properties"]]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("choice", ["required", "lamp"])
def test_demanded_call_has_arguments_of_its_schema(clients: dict[str, openai.OpenAI], family: str, choice: str) -> None:
    named = choice != "required"
    demanded: Any = {"type": "function", "function": {"name": choice}} if named else choice
    for seed in range(4):
        answer = create(clients[family], tool_choice=demanded, parallel_tool_calls=False, seed=seed).choices[0]
        assert answer.finish_reason == ("stop" if named else "tool_calls") and answer.message.content is None
        assert len(answer.message.tool_calls) == 1
        check_calls(answer.message)
        assert not named or answer.message.tool_calls[0].function.name == choice


def test_stop_strings_of_a_calls_markup_leave_a_demanded_call_whole(clients: dict[str, openai.OpenAI]) -> None:
    for family in ("qwen2_5", "llama3"):
        for stream in (False, True):
            answer = create(clients[family], tool_choice="required", stop=["<", "{", '"', "\n"], parallel_tool_calls=False, stream=stream)
            if stream:
                assert [chunk.choices[0].finish_reason for chunk in answer][-1] == "tool_calls"
            else:
                check_calls(answer.choices[0].message)


def test_stop_string_ends_the_content_of_an_answer_with_tools(clients: dict[str, openai.OpenAI]) -> None:
    asked: dict[str, Any] = {"max_tokens": 40, "temperature": 0}
    text = create(clients["qwen2_5"], **asked).choices[0].message.content
    stop = text[10:12]
    for stream in (False, True):
        answer = create(clients["qwen2_5"], stop=[stop], stream=stream, **asked)
        if stream:
            parts = [chunk.choices[0] for chunk in answer]
            assert ("".join(p.delta.content or "" for p in parts), parts[-1].finish_reason) == (text[: text.index(stop)], "stop")
        else:
            choice = answer.choices[0]
            assert (choice.message.content, choice.finish_reason) == (text[: text.index(stop)], "stop")
            assert answer.usage.completion_tokens < 40


def test_named_function_is_called_once_where_a_demanded_call_may_be_followed_by_more(clients: dict[str, openai.OpenAI]) -> None:
    def num_calls(choice: Any, seed: int) -> int:
        return len(create(clients["qwen2_5"], tool_choice=choice, seed=seed, max_tokens=400).choices[0].message.tool_calls)

    assert {num_calls({"type": "function", "function": {"name": "now"}}, seed) for seed in range(12)} == {1}
    assert max(num_calls("required", seed) for seed in range(12)) > 1


def test_model_chooses_and_calls_are_constrained_from_their_mark_on(clients: dict[str, openai.OpenAI]) -> None:
    reasons, parallel = set[str](), 0
    for seed in range(30):
        answer = create(clients["qwen2_5"], seed=seed).choices[0]
        reasons.add(answer.finish_reason)
        assert "<tool_call>" not in (answer.message.content or "")
        if answer.finish_reason == "tool_calls":
            check_calls(answer.message)
            parallel += len(answer.message.tool_calls) > 1
    assert {"tool_calls"} < reasons and parallel, "the tiny model calls, calls twice, and does not call"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_stream_adds_up_to_the_whole_answer(clients: dict[str, openai.OpenAI], family: str, choice: str) -> None:
    for seed in range(3):
        whole = create(clients[family], tool_choice=choice, seed=seed).choices[0]
        content, calls, reason = "", list[dict[str, str]](), None
        for chunk in create(clients[family], tool_choice=choice, seed=seed, stream=True):
            (part,) = chunk.choices
            content, reason = content + (part.delta.content or ""), part.finish_reason or reason
            for piece in part.delta.tool_calls or ():
                if piece.id:
                    assert (piece.type, piece.function.arguments, piece.index) == ("function", "", len(calls))
                    calls.append({"name": piece.function.name, "arguments": ""})
                else:
                    assert piece.index == len(calls) - 1 and piece.function.name is None
                    calls[-1]["arguments"] += piece.function.arguments
        told = [{"name": c.function.name, "arguments": c.function.arguments} for c in whole.message.tool_calls or ()]
        assert (content or None, calls, reason) == (whole.message.content, told, whole.finish_reason)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_streamed_calls_have_each_log_probability_once(clients: dict[str, openai.OpenAI], choice: str) -> None:
    for seed in range(3):
        asked: dict[str, Any] = {"tool_choice": choice, "seed": seed, "logprobs": True, "parallel_tool_calls": False}
        whole = create(clients["qwen2_5"], **asked)
        pieces = [chunk.choices[0].logprobs for chunk in create(clients["qwen2_5"], **asked, stream=True)]
        streamed = [token for piece in pieces if piece for token in piece.content]
        assert streamed == whole.choices[0].logprobs.content
        assert whole.usage.completion_tokens <= len(streamed) <= whole.usage.completion_tokens + 1, "the end of an answer has one too"


class Lamp(BaseModel):
    """Switch a lamp."""

    room: Literal["hall", "kitchen"]
    level: int = Field(ge=0, le=9)


def test_clients_helpers_parse_arguments(clients: dict[str, openai.OpenAI]) -> None:
    options: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 300, "parallel_tool_calls": False}
    options |= {"tools": [openai.pydantic_function_tool(Lamp)], "tool_choice": "required", "seed": 1}
    (parsed,) = clients["qwen2_5"].chat.completions.parse(**options).choices[0].message.tool_calls or ()
    assert isinstance(parsed.function.parsed_arguments, Lamp)
    with clients["qwen2_5"].chat.completions.stream(**options) as stream:
        kinds = [event.type for event in stream]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    assert call.function.parsed_arguments == parsed.function.parsed_arguments


def test_answer_with_calls_and_their_results_is_taken_back(clients: dict[str, openai.OpenAI]) -> None:
    for family in ("qwen2_5", "mistral"):
        message = create(clients[family], tool_choice="required", parallel_tool_calls=False).choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "done"}
        messages = [{"role": "user", "content": "Hi"}, message.model_dump(exclude_none=True), result]
        create(clients[family], messages=messages)


def test_call_that_max_tokens_cuts_has_what_was_written(clients: dict[str, openai.OpenAI]) -> None:
    demanded: Any = {"type": "function", "function": {"name": "weather"}}
    answer = create(clients["qwen2_5"], tool_choice=demanded, max_tokens=70).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "length" and answer.message.content is None
    assert call.function.name == "weather" and call.function.arguments.startswith("{") and not call.function.arguments.endswith("}")
    early = create(clients["qwen2_5"], tool_choice=demanded, max_tokens=4).choices[0]
    assert (early.finish_reason, early.message.content, early.message.tool_calls) == ("length", "", None)


def test_allowed_tools_restrict_the_choice(clients: dict[str, openai.OpenAI]) -> None:
    listed = [{"type": "function", "function": {"name": "now"}}]
    choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": listed}}
    for seed in range(3):
        message = create(clients["qwen2_5"], tool_choice=choice, seed=seed).choices[0].message
        assert {(call.function.name, json.loads(call.function.arguments).__len__()) for call in message.tool_calls} == {("now", 0)}


def test_content_follows_response_format_where_no_tool_is_called(clients: dict[str, openai.OpenAI]) -> None:
    response_format: Any = {"type": "json_schema", "json_schema": {"name": "lamp", "schema": LAMP}}
    kinds = set()
    for seed in range(12):
        answer = create(clients["qwen2_5"], response_format=response_format, seed=seed).choices[0]
        kinds.add(answer.finish_reason)
        if answer.message.tool_calls:
            check_calls(answer.message)
        else:
            jsonschema.validate(json.loads(answer.message.content), LAMP)
    assert kinds >= {"stop"}
    with pytest.raises(openai.BadRequestError, match="without a mark") as refused:
        create(clients["llama3"], response_format=response_format)
    assert refused.value.param == "response_format"


def function(name: Any = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a tool of another type": ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools[0].type"),
    "a tool without a type": ({"tools": [{"function": {"name": "f"}}]}, "invalid_tools", "tools[0].type"),
    "a function without a name": ({"tools": [function(None)]}, "invalid_tools", "tools[0].function.name"),
    "a name with a space": ({"tools": [function("a b")]}, "invalid_tools", "tools[0].function.name"),
    "one name twice": ({"tools": [function(), function()]}, "invalid_tools", "tools[1].function.name"),
    "an unknown field": ({"tools": [function(returns={"type": "string"})]}, "unsupported_parameter", "tools[0].function.returns"),
    "129 tools": ({"tools": [function(f"f{n}") for n in range(129)]}, "invalid_tools", "tools"),
    "schemas of 70 KB": (
        {"tools": [function(f"f{n}", parameters={"type": "object", "description": "a" * 35_000}) for n in range(2)]},
        "invalid_function_parameters",
        "tools",
    ),
    "a schema that is not of an object": (
        {"tools": [function(parameters={"type": "array"})]},
        "invalid_function_parameters",
        "tools[0].function.parameters",
    ),
    "a schema that cannot be enforced": (
        {"tools": [function("a"), function("b", parameters={"type": "object", "properties": {"x": {"not": {"type": "null"}}}})]},
        "invalid_function_parameters",
        "tools[1].function.parameters",
    ),
    "a multipleOf that takes minutes to compile": (
        {"tools": [function(parameters={"type": "object", "properties": {"x": {"multipleOf": 1_000_003}}})]},
        "invalid_function_parameters",
        "tools[0].function.parameters",
    ),
    "a choice that is not known": ({"tool_choice": "any"}, "invalid_tools", "tool_choice"),
    "a choice of another type": ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "unsupported_parameter", "tool_choice"),
    "a choice that is not among tools": ({"tool_choice": function("g")}, "invalid_tools", "tool_choice"),
    "a demand without tools": ({"tools": [], "tool_choice": "required"}, "invalid_tools", "tool_choice"),
    "parallel calls without tools": ({"tools": [], "parallel_tool_calls": True}, "invalid_tools", "parallel_tool_calls"),
    "functions of the older form": ({"tools": None, "functions": [{"name": "f"}]}, "unsupported_parameter", "functions"),
    "a function call of the older form": ({"tools": None, "function_call": {"name": "f"}}, "unsupported_parameter", "function_call"),
    "no function call of the older form": ({"function_call": "none"}, "unsupported_parameter", "function_call"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tools_that_cannot_be_used_as_sent_are_refused(clients: dict[str, openai.OpenAI], case: str) -> None:
    options, code, param = REFUSED[case]
    with pytest.raises(openai.BadRequestError) as refused:
        create(clients["qwen2_5"], extra_body=options)
    assert (refused.value.code, refused.value.param) == (code, param)


def test_null_and_none_and_empty_tools_call_nothing(clients: dict[str, openai.OpenAI]) -> None:
    plain = create(clients["qwen2_5"], tools=[], max_tokens=20).choices[0].message
    for options in (
        {"tools": None},
        {"tools": [], "tool_choice": "none"},
        {"tools": None, "tool_choice": None, "parallel_tool_calls": None},
    ):
        assert create(clients["qwen2_5"], max_tokens=20, extra_body=options).choices[0].message == plain
    assert create(clients["qwen2_5"], tool_choice="none", max_tokens=40).choices[0].message.tool_calls is None


def test_template_whose_calls_cannot_be_read_is_refused(clients: dict[str, openai.OpenAI]) -> None:
    with pytest.raises(openai.BadRequestError, match="cannot read back") as refused:
        create(clients["public qwen3_6"])
    assert (refused.value.code, refused.value.param) == ("tool_calls_not_readable", "tools")


def test_template_that_does_not_render_tools_is_refused(tmp_path: Path) -> None:
    with (
        inference_server(build_tiny_model(tmp_path / "base"), port=free_port()) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0) as client,
    ):
        for choice in ("auto", "required"):
            with pytest.raises(openai.BadRequestError) as refused:
                create(client, tool_choice=choice)
            assert (refused.value.code, refused.value.param) == ("tools_not_rendered", "tools")
        repeated = {"chat_template_kwargs": {"tools": TOOLS}}  # as the gateway sends them
        for more in ({}, repeated):
            assert create(client, tool_choice="none", max_tokens=8, extra_body=more).choices[0].message.content is not None
