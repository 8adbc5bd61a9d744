"""What a request demands of its answer's form: enforced by the embedded server, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.inference_server import TOKEN, free_port, inference_server
from tests.tiny_model import build_tiny_model

ASK: list[Any] = [{"role": "user", "content": "Hello"}]
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("formats")
    build_tiny_model(root / "base")
    return root


@pytest.fixture(scope="module")
def url(place: Path) -> Iterator[str]:
    with inference_server(place / "base", port=free_port()) as found:
        yield found


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0, timeout=30) as made:
        yield made


def refused(client: openai.OpenAI, **options: Any) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=ASK, max_tokens=4, **options)
    return caught.value


@pytest.mark.parametrize("kind", ["json_object", "json_schema", "grammar"])
def test_a_format_that_is_not_enforced_is_refused(client: openai.OpenAI, kind: str) -> None:
    error = refused(client, response_format={"type": kind})
    assert (error.code, error.param) == ("unsupported_parameter", "response_format")
    assert repr(kind) in error.message


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "a tool": ({"tools": [TOOL]}, "tools"),
    "a tool that must be called": ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
    "a named tool": ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice"),
    "a function of the older form": ({"functions": [TOOL["function"]]}, "functions"),
}


@pytest.mark.parametrize("case", CALLS)
def test_tools_that_the_answer_might_call_are_refused(client: openai.OpenAI, case: str) -> None:
    options, param = CALLS[case]
    error = refused(client, **options)
    assert (error.code, error.param) == ("unsupported_parameter", param)
    assert "this server calls none" in error.message


@pytest.mark.parametrize(
    "options", [{"tools": [TOOL], "tool_choice": "none"}, {"tools": []}, {"tool_choice": "auto"}, {"response_format": {"type": "text"}}]
)
def test_what_demands_nothing_is_answered(client: openai.OpenAI, options: dict[str, Any]) -> None:
    answer = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=4, **options)
    assert answer.usage is not None and answer.usage.completion_tokens > 0
