"""Tools through the gateway from a real inference server, as an application calls them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import openai
import pytest
from starlette.types import ASGIApp

from control_plane.api.app import create_app
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from ft_client import FtClient
from tests.support.models.tool_rows import SCHEMAS, TOOLS
from tests.support.models.tool_templates import READABLE, build_tool_model
from tests.support.servers.inference_server import TOKEN, free_port, inference_server

BASE = "tiny-base"
QUESTION = [{"role": "user", "content": "How warm is the hall?"}]


@pytest.fixture(scope="module")
def served(
    new_platform: Callable[..., Platform], serve: Callable[[ASGIApp], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[openai.OpenAI, FtClient]]:
    base = build_tool_model(tmp_path_factory.mktemp("served") / "base", READABLE["qwen2_5"])
    with inference_server(base, port=free_port(), name=BASE) as url:
        platform = new_platform(inference_urls=url, inference_token=TOKEN)
        _, key = tenants.create(platform, f"t-{uuid.uuid4().hex[:8]}")
        api = serve(create_app(platform))
        with (
            openai.OpenAI(base_url=f"{api}/v1", api_key=key.secret, max_retries=0) as client,
            FtClient(base_url=api, api_key=key.secret) as ft,
        ):
            yield client, ft


def test_calls_pass_the_gateway_whole_and_streamed(served: tuple[openai.OpenAI, FtClient]) -> None:
    client, ft = served
    asked: Any = {"model": BASE, "messages": QUESTION, "tools": list(TOOLS), "tool_choice": "required", "seed": 2, "max_tokens": 300}
    asked["parallel_tool_calls"] = False
    answer = client.chat.completions.create(**asked).choices[0]
    (call,) = answer.message.tool_calls or ()
    assert call.type == "function"
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    with client.chat.completions.stream(**asked) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)
    del asked["model"], asked["messages"]
    assert "".join(ft.chat.stream(model=BASE, messages=QUESTION, **asked)) == f"\n{call.function.name} {call.function.arguments}"


def test_calls_and_results_go_back_through_the_gateway(served: tuple[openai.OpenAI, FtClient]) -> None:
    client, _ = served
    called: Any = {"id": "c1", "type": "function", "function": {"name": "read_temperature", "arguments": '{"room": "hall"}'}}
    history: Any = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [called]}]
    history.append({"role": "tool", "tool_call_id": "c1", "content": '{"degrees": 20}'})
    answer = client.chat.completions.create(model=BASE, messages=history, tools=list(TOOLS), tool_choice="none", max_tokens=8)  # type: ignore[arg-type]
    assert answer.choices[0].message.tool_calls is None


def test_invalid_tool_is_refused_through_the_gateway(served: tuple[openai.OpenAI, FtClient]) -> None:
    client, _ = served
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"not": {}}}}}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=BASE, messages=QUESTION, tools=[tool])  # type: ignore[arg-type]
    assert refused.value.param == "tools[0].function.parameters"
