"""Limits of requests: checked quickly, before parsing, and named in the refusal."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from control_plane.api.app import create_app
from control_plane.platform.context import Platform
from control_plane.serving.request_limits import check_limits
from core.errors import InvalidRequest
from core.storable_text import check_storable
from engine.data.conversation import normalize_request
from resources.inference.request_errors import RequestError
from resources.inference.schemas import ChatRequest, CompletionRequest

USER = {"role": "user", "content": "a"}
LARGE: dict[str, dict[str, Any]] = {
    "texts and a token": {"prompt": ["a"] * 300_000 + [1]},
    "prompts": {"prompt": ["a"] * 900_000},
    "prompts of tokens and texts": {"prompt": [[1]] * 300_000 + [["a"]]},
    "stops": {"messages": [USER], "stop": ["a"] * 900_000},
    "stops that are numbers": {"messages": [USER], "stop": [1] * 900_000},
    "biases": {"messages": [USER], "logit_bias": {f"a{n}": "b" for n in range(300_000)}},
    "messages that are numbers": {"messages": [1] * 900_000},
    "messages": {"messages": [USER] * 100_000},
    "items": {"input": [USER] * 100_000},
    "tools": {"messages": [USER], "tools": [{"type": "function"}] * 100_000},
    "a schema": {"messages": [USER], "response_format": {f"a{n}": {} for n in range(300_000)}},
    "words of another server": {"messages": [USER], "bad_words": ["a"] * 900_000},
    "answers": {"messages": [USER], "n": 10**6},
    "answers to prompts": {"prompt": ["a"] * 16, "n": 9},
    "answers in words": {"prompt": ["a"] * 128, "n": "16"},
    "answers in fractions": {"prompt": ["a"] * 128, "n": 16.0},
    "answers of a truth": {"prompt": "a", "n": True},
}


@pytest.mark.parametrize("name", LARGE)
def test_large_field_is_refused_by_name_before_it_is_parsed(name: str) -> None:
    body = {"model": "m", **LARGE[name]}
    began = time.process_time()
    with pytest.raises(InvalidRequest) as refused:
        check_limits(body)
    assert refused.value.param is not None
    assert refused.value.param in body
    if "input" not in body:
        with pytest.raises(InvalidRequest, match=refused.value.message[:30]):  # so do the embedded server's own models
            (CompletionRequest if "prompt" in body else ChatRequest).model_validate(body)
    assert time.process_time() - began < 1.0


def test_what_fits_the_limits_passes() -> None:
    check_limits({"model": "m", "messages": [USER] * 10_000, "stop": ["a" * 256] * 16, "n": 16, "logit_bias": {"0": -100, "50256": 1.5}})
    check_limits({"model": "m", "prompt": [[1, 2], [3]], "n": 16, "stop": None, "seed": 1})
    check_limits({"model": "m", "prompt": "a" * 10**6, "user": "u" * 65_536})


def test_a_field_with_a_long_name_is_refused_quickly() -> None:
    body = {"model": "m", "messages": [USER], "".join(chr(33 + n % 90) for n in range(3_000_000)): 1}
    began = time.process_time()
    with pytest.raises(RequestError, match="is not a field of this request; remove it"):
        ChatRequest.model_validate(body)
    assert time.process_time() - began < 0.3


def test_long_lists_of_plain_values_are_checked_quickly() -> None:
    began = time.process_time()
    check_storable({"prompt": [1] * 1_900_000})
    assert time.process_time() - began < 1.0
    with pytest.raises(InvalidRequest) as refused:
        check_storable({"prompt": [*["a"] * 1000, "\0"]})
    assert refused.value.param == "prompt[1000]"


@pytest.mark.parametrize(("path", "field"), [("/v1/chat/completions", "messages"), ("/v1/responses", "input")])
def test_a_long_conversation_is_read_in_a_thread(platform: Platform, api_key: str, path: str, field: str) -> None:
    """The event loop, which all tenants share, parses the JSON only."""
    messages = [{"role": "user", "content": "a" * 300}] * 10_000
    began = time.thread_time()
    check_storable({"messages": messages})
    normalize_request({"messages": messages})
    reading_s = time.thread_time() - began
    body = json.dumps({"model": "no-such-model", field: messages})

    async def scenario() -> tuple[httpx.Response, float]:
        app = create_app(platform)
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=60)
        async with app.router.lifespan_context(app), client:
            headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
            await client.post(path, content="{}", headers=headers)
            began = time.thread_time()
            return await client.post(path, content=body, headers=headers), time.thread_time() - began

    answer, loop_s = asyncio.run(scenario())
    assert answer.json()["error"]["code"] == "model_not_found"
    assert loop_s < reading_s, (loop_s, reading_s)
