"""The Responses API at the gateway, as OpenAI's client uses it: text, structured output, function calls, streams, and what is refused."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from fastapi import FastAPI
from fastapi import Response as PlainResponse
from fastapi.responses import JSONResponse
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from control_plane.api.app import create_app
from control_plane.platform.context import Platform
from control_plane.serving.responses import requests
from control_plane.serving.responses.events import ResponseStream
from control_plane.serving.responses.response_objects import whole_response
from control_plane.serving.responses.translation import translate
from control_plane.tenants import service as tenants
from core.errors import InvalidRequest, Unavailable
from engine.data.conversation import normalize_request
from tests.support.models.tool_templates import READABLE, build_tool_model
from tests.support.servers.inference_server import TOKEN, free_port, inference_server

MODEL = "tiny-base"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


class Weather(BaseModel):
    """Get the weather."""

    model_config = ConfigDict(extra="forbid")
    unit: Literal["C", "F"]
    days: int = Field(ge=1, le=9)


TOOLS: Any = [
    {"type": "function", "name": "Weather", "description": "Get the weather.", "parameters": Weather.model_json_schema(), "strict": True}
]


@pytest.fixture(scope="module")
def client(
    new_platform: Callable[..., Platform], serve: Callable[[FastAPI], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    base = build_tool_model(tmp_path_factory.mktemp("responses") / "base", READABLE["qwen2_5"])
    with inference_server(base, port=free_port(), name=MODEL) as url:
        platform = new_platform(inference_urls=url, inference_token=TOKEN)
        _, key = tenants.create(platform, f"responses-{uuid.uuid4().hex[:8]}")
        with openai.OpenAI(base_url=f"{serve(create_app(platform))}/v1", api_key=key.secret, max_retries=0) as made:
            yield made


def raw_events(client: openai.OpenAI, **body: Any) -> list[dict[str, Any]]:
    """Events of a stream as they are on the wire."""
    headers = {"authorization": f"Bearer {client.api_key}"}
    answer = httpx.post(f"{client.base_url}responses", json={"model": MODEL, "stream": True, **body}, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    blocks = [dict(line.split(": ", 1) for line in block.splitlines()) for block in answer.text.split("\n\n") if block]
    found = [json.loads(block["data"]) for block in blocks]
    assert [block["event"] for block in blocks] == [event["type"] for event in found]
    return found


def test_text_is_cut_at_max_output_tokens_and_counted(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="Hi", instructions="Be brief", max_output_tokens=8, temperature=0)
    Response.model_validate(answer.model_dump(), strict=True)
    assert (answer.status, answer.incomplete_details and answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage is not None
    assert (answer.usage.output_tokens, answer.output_text != "") == (8, True)
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}], max_tokens=8, temperature=0
    )
    assert (chat.choices[0].message.content, chat.usage and chat.usage.prompt_tokens) == (answer.output_text, answer.usage.input_tokens)


def test_structured_output_follows_the_schema(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(model=MODEL, input="Hi", text_format=Weather).output_parsed
    assert isinstance(parsed, Weather)


def test_a_function_call_and_its_result_go_back_as_items(client: openai.OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]}]
    first = client.responses.create(model=MODEL, input=items, tools=TOOLS, tool_choice={"type": "function", "name": "Weather"})
    (call,) = first.output
    assert call.type == "function_call"
    Weather.model_validate_json(call.arguments)
    items += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "yes"}]
    second = client.responses.create(model=MODEL, input=items, tools=TOOLS, tool_choice="none", max_output_tokens=4)
    messages: Any = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "yes"},
    ]  # fmt: skip
    nested: Any = [{"type": "function", "function": {k: v for k, v in TOOLS[0].items() if k != "type"}}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, tools=nested, tool_choice="none", max_tokens=4)
    assert second.usage is not None and chat.usage is not None
    assert second.usage.input_tokens == chat.usage.prompt_tokens  # the items render as the chat does


def test_a_stream_has_openais_events_in_order_and_ends_with_the_whole_response(client: openai.OpenAI) -> None:
    events = raw_events(client, input="Hi", max_output_tokens=6)
    for event in events:
        EVENT.validate_python(event, strict=True)
    kinds = [event["type"] for event in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete"]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    (item,) = events[-1]["response"]["output"]
    assert text == item["content"][0]["text"] != ""
    assert events[-1]["response"]["usage"]["output_tokens"] == 6


def test_the_clients_own_stream_helper_assembles_calls(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="Rain?", tools=TOOLS, tool_choice="required", parallel_tool_calls=False) as stream:
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_response().output
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done", "response.completed"} <= kinds
    assert call.type == "function_call"
    Weather.model_validate_json(call.arguments)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"temprature": 1}, "temprature"),
        ({"input": None}, "input"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"mood": "good"}}, "reasoning.mood"),
        ({"max_tool_calls": "3"}, "max_tool_calls"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.allowed_tools"),
        ({"stop": ["x"] * 17}, "stop"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(client: openai.OpenAI, body: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input="x", extra_body=body)
    assert refused.value.param == param


def test_null_means_absent_in_every_optional_field(client: openai.OpenAI) -> None:
    nulls = {name: None for name in ResponseCreateParamsBase.__annotations__ if name not in ("model", "input")}
    assert client.responses.create(model=MODEL, input="x", extra_body={**nulls, "max_output_tokens": 2}).status == "incomplete"


def test_every_field_of_the_installed_client_is_decided() -> None:
    assert {*ResponseCreateParamsBase.__annotations__, "stream"} <= requests.READ | requests.ONLY.keys()


def test_a_stored_response_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="not stored"):
        client.responses.retrieve("resp_1")
    with pytest.raises(openai.NotFoundError, match="not stored"):
        client.responses.cancel("resp_1")


@pytest.mark.parametrize("cut", [1, 7, 10_000])
def test_a_stream_that_breaks_off_fails_with_what_was_written(cut: int) -> None:
    chunk = {"choices": [{"delta": {"content": "Rain"}, "finish_reason": None}]}
    wire = f"data: {json.dumps(chunk)}\n\n".encode()

    async def pieces() -> Any:
        for at in range(0, len(wire), cut):
            yield wire[at : at + cut]

    async def translated() -> list[dict[str, Any]]:
        return [json.loads(e.split(b"data: ", 1)[1]) async for e in ResponseStream({}, model=MODEL).events(pieces())]

    events = asyncio.run(translated())
    assert [e["type"] for e in events][-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.failed",
    ]  # fmt: skip
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Rain"
    assert next(e for e in events if e["type"] == "error")["code"] == "inference_unavailable"


def translated(asked: requests.ResponseRequest, *chunks: Any) -> list[dict[str, Any]]:
    """Events of a stream whose chunks are these."""

    async def wire() -> Any:
        for chunk in chunks:
            yield f"data: {chunk if isinstance(chunk, str) else json.dumps(chunk)}\n\n".encode("utf-8", "surrogateescape")

    async def found() -> list[dict[str, Any]]:
        stream = ResponseStream(asked.repeated, model=MODEL, words=asked.in_callers_words)
        return [json.loads(e.split(b"data: ", 1)[1]) async for e in stream.events(wire())]

    return asyncio.run(found())


def delta(**fields: Any) -> dict[str, Any]:
    reason = fields.pop("finish_reason", None)
    return {"choices": [{"delta": fields, "finish_reason": reason}]}


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("content", ["", "Yes"])
def test_whole_answer_and_stream_have_the_same_items_after_reasoning(reason: str, content: str) -> None:
    asked = requests.read_request({"model": MODEL, "input": "x"})
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    message = {"role": "assistant", "content": content or None, "reasoning_content": "Hm."}
    whole = whole_response({"model": MODEL, "choices": [{"message": message, "finish_reason": reason}], "usage": usage}, asked.repeated)
    parts = [delta(role="assistant", content=""), delta(reasoning_content="Hm."), *([delta(content=content)] if content else [])]
    streamed = translated(asked, *parts, {**delta(finish_reason=reason), "usage": usage}, "[DONE]")[-1]["response"]
    assert [(item["type"], item["status"]) for item in streamed["output"]] == [(item["type"], item["status"]) for item in whole["output"]]
    assert [item["type"] for item in whole["output"]] == ["reasoning", *(["message"] if content else [])]
    assert (streamed["status"], streamed["incomplete_details"]) == (whole["status"], whole["incomplete_details"])


@pytest.mark.parametrize(
    "odd",
    [
        {"error": "boom"}, {"error": ["boom"]}, ["a"], "7", "null", "{", "\udcff", {"choices": ["a"]}, {"choices": [{"delta": "a"}]},
        {"choices": [{"delta": {"content": 5}}]}, {"choices": [{"delta": {"tool_calls": [{"function": "f"}]}}]},
        {"choices": [], "usage": {"a": 1}},
    ],
)  # fmt: skip
def test_odd_chunk_of_a_server_fails_the_response(odd: Any) -> None:
    asked = requests.read_request({"model": MODEL, "input": "x"})
    events = translated(asked, delta(content="Rain"), odd, delta(content="x", finish_reason="stop"))
    assert [events[-1]["type"], events[-1]["response"]["status"]] == ["response.failed", "failed"]
    assert next(e for e in events if e["type"] == "error")["code"] == "inference_unavailable"
    assert sum(e["type"] == "error" for e in events) == 1


def test_error_in_a_stream_names_the_callers_field() -> None:
    asked = requests.read_request({"model": MODEL, "input": [{"role": "user", "content": "x"}]})
    for theirs, own in (("response_format", "text.format"), ("messages[0].content", "input[0].content")):
        failed = {"error": {"message": f"{theirs}: too much work", "code": "invalid_response_format", "param": theirs}}
        error, last = translated(asked, failed)[2:]
        assert (error["param"], error["message"]) == (own, f"{own}: too much work")
        assert last["response"]["error"]["message"] == f"{own}: too much work"


REASON = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
CALLED = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "yes"}
SAID = {"role": "assistant", "content": "Let me look."}
ASKED = {"role": "user", "content": "x"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "yes"}
TURNS: dict[str, tuple[list[Any], list[Any]]] = {
    "two items of reasoning": (
        [ASKED, REASON, REASON, SAID],
        [ASKED, {"role": "assistant", "content": "Let me look.", "reasoning_content": "Hm.\nHm."}],
    ),
    "a turn cut in its reasoning": (
        [ASKED, REASON, ASKED], [ASKED, {"role": "assistant", "content": "", "reasoning_content": "Hm."}, ASKED],
    ),
    "a message between a call and its result": (
        [ASKED, CALLED, SAID, RESULT], [ASKED, {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL]}, TOOL],
    ),
    "a message before its call": (
        [ASKED, REASON, SAID, CALLED, RESULT],
        [ASKED, {"role": "assistant", "content": "Let me look.", "reasoning_content": "Hm.", "tool_calls": [CALL]}, TOOL],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TURNS)
def test_items_of_one_turn_are_one_message(name: str) -> None:
    items, messages = TURNS[name]
    chat = requests.read_request({"model": MODEL, "input": items, "instructions": ""}).chat
    assert chat["messages"] == messages
    assert len(normalize_request(chat)["messages"]) == len(messages)


def test_usage_counts_cached_and_reasoning_tokens_in_whole_answers_and_streams() -> None:
    asked = requests.read_request({"model": MODEL, "input": "x"})
    early = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
    usage = {
        "prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13, "prompt_tokens_details": {"cached_tokens": 5},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }  # fmt: skip
    message = {"role": "assistant", "content": "Yes"}
    whole = whole_response({"model": MODEL, "choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}, asked.repeated)
    chunks = [{**delta(content="Yes"), "usage": early}, delta(finish_reason="stop"), {"choices": [], "usage": usage}, {"usage": None}]
    assert whole["usage"] == {
        "input_tokens": 9, "input_tokens_details": {"cached_tokens": 5, "cache_write_tokens": 0},
        "output_tokens": 4, "output_tokens_details": {"reasoning_tokens": 3}, "total_tokens": 13,
    }  # fmt: skip
    assert translated(asked, *chunks)[-1]["response"]["usage"] == whole["usage"]


@pytest.mark.parametrize(("reason", "theirs"), [("length", "max_output_tokens"), ("content_filter", "content_filter")])
def test_answer_that_was_ended_early_is_incomplete_with_its_reason(reason: str, theirs: str) -> None:
    asked = requests.read_request({"model": MODEL, "input": "x"})
    last = translated(asked, delta(content="Yes"), delta(finish_reason=reason))[-1]
    found = last["response"]
    assert (last["type"], found["incomplete_details"], found["completed_at"]) == ("response.incomplete", {"reason": theirs}, None)
    assert [item["status"] for item in found["output"]] == ["incomplete"]


def test_two_messages_of_the_assistant_in_a_row_are_both_kept() -> None:
    chat = requests.read_request({"model": MODEL, "input": [ASKED, SAID, {**SAID, "content": "Found."}]}).chat
    assert chat["messages"] == [ASKED, SAID, {**SAID, "content": "Found."}]


@pytest.mark.parametrize(
    ("theirs", "own"),
    [
        ("messages[1].reasoning_content", "input[1].reasoning_content"),
        ("messages[1].tool_calls[0].function.arguments", "input[2].arguments"),
        ("messages[2].content", "input[3].output"),
        ("max_completion_tokens", "max_output_tokens"),
        ("tools[0].function.name", "tools[0].name"),
        ("temperature", "temperature"),
    ],
)
def test_refusal_names_the_callers_own_field(theirs: str, own: str) -> None:
    asked = requests.read_request({"model": MODEL, "input": [ASKED, REASON, CALLED, RESULT]})
    found = asked.refusal(InvalidRequest(f"{theirs} is odd", code="invalid_request", param=theirs))
    assert (found.message, found.param, found.code) == (f"{own} is odd", own, "invalid_request")


def test_refusal_of_the_chat_completion_keeps_its_status_code_and_headers() -> None:
    asked = requests.read_request({"model": MODEL, "input": "x"})
    error = {"error": {"message": "messages[0] is long", "type": "rate_limit_error", "param": "messages[0]", "code": "too_many_tokens"}}
    headers = {"x-ft-model": "m", "x-ft-adapter": "a"}
    answer = translate(JSONResponse(error, status_code=429, headers=headers), asked)
    assert (answer.status_code, {name: answer.headers[name] for name in headers}) == (429, headers)
    assert json.loads(bytes(answer.body))["error"] == {**error["error"], "message": "input is long", "param": "input"}


def test_fields_of_a_response_reach_the_chat_completion_and_are_repeated() -> None:
    tool = {"type": "function", "strict": False, "parameters": {"type": "object"}, "description": "d", "name": "f"}
    body = {"model": MODEL, "input": "x", "max_output_tokens": 7, "tools": [tool], "prompt_cache_key": "k", "safety_identifier": "s"}
    asked = requests.read_request(body)
    assert list(asked.chat["tools"][0]["function"].items()) == [("name", "f"), ("description", "d"), ("parameters", {"type": "object"})]
    assert (asked.chat["max_completion_tokens"], asked.chat["user"], asked.session) == (7, "s", "k")
    assert {name: asked.repeated[name] for name in ("max_output_tokens", "parallel_tool_calls", "tool_choice", "store", "tools")} == {
        "max_output_tokens": 7, "parallel_tool_calls": True, "tool_choice": "auto", "store": False, "tools": [tool],
    }  # fmt: skip


def test_reasoning_that_only_its_maker_can_read_is_refused() -> None:
    sealed = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "abc"}
    with pytest.raises(InvalidRequest) as found:
        requests.read_request({"model": MODEL, "input": [ASKED, sealed]})
    assert (found.value.code, found.value.param) == ("unsupported_parameter", "input[1].encrypted_content")


def test_allowed_tools_restrict_the_calls_of_a_response(client: openai.OpenAI) -> None:
    other = {**TOOLS[0], "name": "Other"}
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "Other"}]}
    answer = client.responses.create(model=MODEL, input="x", tools=[*TOOLS, other], tool_choice=choice, parallel_tool_calls=False)
    assert [item.name for item in answer.output if item.type == "function_call"] == ["Other"]


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"model": "m", "choices": []}', b'{"model": "m", "choices": [{"message": null}]}'])
def test_upstream_answer_that_is_not_a_chat_completion_is_a_server_error(body: bytes) -> None:
    with pytest.raises(Unavailable, match="not a chat completion"):
        translate(PlainResponse(body), requests.read_request({"model": MODEL, "input": "x"}))
