"""Answers that follow a schema, through the gateway from a real inference server, as an application asks for them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from starlette.types import ASGIApp

from control_plane.api.app import create_app
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from tests.support.jobs.registered_adapter import add_adapter
from tests.support.models.tiny_adapter import build_tiny_adapter
from tests.support.models.tiny_model import build_tiny_model
from tests.support.servers.inference_server import HEADERS, TOKEN, free_port, inference_server

BASE = "tiny-base"
CATEGORIES = ["fantasy", "horror", "humor", "adventure"]
BOOKS = [("The Long Night", "An old house at the end of a road."), ("Ten Jokes", "A dog learns to drive."), ("West", "Two boats, one map.")]


@pytest.fixture(scope="module")
def served(
    new_platform: Callable[..., Platform], serve: Callable[[ASGIApp], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[openai.OpenAI, str]]:
    """A tenant's client and the name of its adapter, which one inference server answers with beside the base."""
    root = tmp_path_factory.mktemp("served")
    base = build_tiny_model(root / "base")
    build_tiny_adapter(root / "adapter", base, base_name=BASE, seed=1)
    with inference_server(base, port=free_port(), name=BASE) as url:
        platform = new_platform(inference_urls=url, inference_token=TOKEN)
        tenant = f"t-{uuid.uuid4().hex[:8]}"
        _, key = tenants.create(platform, tenant)
        name = f"ft:{BASE}:{tenant}:goodreads:abc123"
        add_adapter(platform, tenant, name=name, stage="production", loaded=True)
        body = {"lora_name": name, "lora_path": str(root / "adapter")}
        httpx.post(f"{url}/v1/load_lora_adapter", json=body, headers=HEADERS, timeout=60).raise_for_status()
        with openai.OpenAI(base_url=f"{serve(create_app(platform))}/v1", api_key=key.secret, max_retries=0) as client:
            yield client, name


def category_of(client: openai.OpenAI, model: str, book: tuple[str, str]) -> str:
    """A book's category as `model` names it: the answer is one of the categories, whatever the model has learned."""
    schema = {
        "type": "object",
        "properties": {"category": {"type": "string", "enum": CATEGORIES}},
        "required": ["category"],
        "additionalProperties": False,
    }
    completion = client.chat.completions.create(
        model=model,
        messages=[
            {"role": "system", "content": "Name the category of the book."},
            {"role": "user", "content": f"Which category is {book[0]}? Description: {book[1]}"},
        ],
        response_format={"type": "json_schema", "json_schema": {"name": "category", "schema": schema, "strict": True}},
    )
    (choice,) = completion.choices
    assert (completion.model, choice.finish_reason) == (model, "stop")
    return str(json.loads(choice.message.content or "")["category"])


def test_base_and_adapter_answer_with_one_of_the_categories(served: tuple[openai.OpenAI, str]) -> None:
    client, adapter = served
    for book in BOOKS:
        for model in (adapter, BASE):
            assert category_of(client, model, book) in CATEGORIES


def test_a_stream_through_the_gateway_follows_the_schema(served: tuple[openai.OpenAI, str]) -> None:
    client, adapter = served
    asked: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["one", "two"]}}}
    chunks = client.chat.completions.create(
        model=adapter, messages=[{"role": "user", "content": "Count"}], response_format=asked, stream=True
    )
    assert json.loads("".join(c.choices[0].delta.content or "" for c in chunks)) in ("one", "two")


REFUSED: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "tools": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
        "tools",
        "tools_not_rendered",
        "does not render tools",
    ),
    "an unknown format": (
        {"response_format": {"type": "xml"}},
        "response_format",
        "invalid_response_format",
        "type 'xml' is not supported",
    ),
    "a schema that cannot be enforced": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}},
        "response_format",
        "invalid_response_format",
        'Unimplemented keys: ["not"]',
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_server_does_not_enforce_is_refused_by_the_gateway(served: tuple[openai.OpenAI, str], case: str) -> None:
    client, adapter = served
    options, param, code, message = REFUSED[case]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=adapter, messages=[{"role": "user", "content": "Hi"}], **options)
    assert (refused.value.code, refused.value.param) == (code, param)
    assert message in refused.value.message
