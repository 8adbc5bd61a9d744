"""Server-sent events of a job, and completions passed on to inference servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp

from control_plane.api.app import create_app
from control_plane.jobs.transitions import transition
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.tenants import service as tenants
from core.errors import InvalidRequest, NotFound
from engine.data.conversation import normalize_request
from ft_client import FtClient
from tests.support.jobs.followed_jobs import until
from tests.support.jobs.registered_adapter import add_adapter


def move(platform: Platform, job_id: str, state: str) -> None:
    with platform.engine.begin() as conn:
        transition(conn, job_id, JobState(state), message=f"now {state}")


def test_a_stream_of_events_follows_the_job_to_its_end(ft: FtClient, platform: Platform, training_file: str) -> None:
    job = ft.jobs.create(model="tiny-base", training_file=training_file)
    seen: list[str] = []
    follower = threading.Thread(target=lambda: seen.extend(e["code"] for e in ft.jobs.follow(job["id"])))
    follower.start()
    for state in ("queued", "provisioning", "running"):
        move(platform, job["id"], state)
    deadline = time.monotonic() + 20
    while "job_running" not in seen:
        assert time.monotonic() < deadline, f"events do not arrive while the job runs: {seen}"
        time.sleep(0.05)
    assert "job_failed" not in seen
    move(platform, job["id"], "failed")
    follower.join(timeout=20)
    assert seen == ["job_created", "job_queued", "job_provisioning", "job_running", "job_failed"]


def test_a_stream_that_broke_off_goes_on_behind_the_last_event(api_url: str, api_key: str, ft: FtClient, training_file: str) -> None:
    job = ft.jobs.create(model="tiny-base", training_file=training_file)
    ft.jobs.cancel(job["id"])
    url, headers = f"{api_url}/v1/fine_tuning/jobs/{job['id']}/events?stream=true", {"authorization": f"Bearer {api_key}"}
    whole = httpx.get(url, headers=headers)
    assert whole.headers["content-type"].startswith("text/event-stream")
    first, second, done, _ = whole.text.split("\n\n")
    assert done == "data: [DONE]"
    last = first.splitlines()[0].removeprefix("id: ")
    rest = httpx.get(url, headers=headers | {"last-event-id": last}).text
    assert rest == f"{second}\n\n{done}\n\n"


@pytest.fixture(scope="module")
def engine() -> FastAPI:
    """An inference server: it answers with the model that it was asked for, and records what it was sent."""
    app = FastAPI()
    app.state.seen, app.state.senders = [], []
    app.state.hung_up, app.state.gave_up = threading.Event(), threading.Event()

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        body = await request.json()
        app.state.seen.append(body)
        app.state.senders.append((request.headers.get("x-ft-tenant"), request.headers.get("x-ft-weight")))
        if body.get("max_tokens") == 0:
            return JSONResponse(
                {"error": {"message": "max_tokens must be at least 1", "type": "BadRequestError", "param": None, "code": 400}}, 400
            )
        if body.get("max_tokens") == 666:
            return JSONResponse({"error": {"message": "engine dead", "type": "x", "code": 500}}, 500)
        if body.get("max_tokens") == 998:
            while not await request.is_disconnected():
                await asyncio.sleep(0.02)
            app.state.gave_up.set()
        if body.get("stream"):
            return StreamingResponse(words(body["model"], for_ever=body.get("max_tokens") == 999), media_type="text/event-stream")
        message = {"role": "assistant", "content": "hello"}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        return {"id": "c", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice]}

    async def words(model: str, *, for_ever: bool) -> AsyncIterator[str]:
        try:
            while True:
                for word in ("hel", "lo"):
                    choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
                    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": model, "choices": [choice]}
                    yield f"data: {json.dumps(chunk)}\n\n"
                    await asyncio.sleep(0.01)
                if not for_ever:
                    yield "data: [DONE]\n\n"
                    return
        finally:
            if for_ever:
                app.state.hung_up.set()

    return app


@pytest.fixture(scope="module")
def served(new_platform: Callable[..., Platform], serve: Callable[[ASGIApp], str], engine: FastAPI) -> tuple[Platform, str]:
    """A platform with two replicas, of which the first is down, and its API's URL."""
    platform = new_platform(inference_urls=f"http://127.0.0.1:9,{serve(engine)}")
    return platform, serve(create_app(platform))


@pytest.fixture
def caller(served: tuple[Platform, str]) -> Iterator[tuple[str, openai.OpenAI, FtClient]]:
    """A new tenant: its id and its two clients."""
    platform, url = served
    tenant = f"t-{uuid.uuid4().hex[:8]}"
    _, key = tenants.create(platform, tenant)
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key.secret, max_retries=0) as client, FtClient(base_url=url, api_key=key.secret) as ft:
        yield tenant, client, ft


ASK: list[Any] = [{"role": "user", "content": "hi"}]


def test_a_base_model_answers_through_the_replica_that_is_up(caller: tuple[str, openai.OpenAI, FtClient]) -> None:
    _, client, ft = caller
    for _ in range(4):  # both replicas get their turn
        answer = client.chat.completions.create(model="tiny-base", messages=ASK)
        assert (answer.choices[0].message.content, answer.model) == ("hello", "tiny-base")
    assert ft.chat.create(model="tiny-base", messages=ASK)["choices"][0]["message"]["content"] == "hello"


def test_a_stream_arrives_piece_by_piece(caller: tuple[str, openai.OpenAI, FtClient]) -> None:
    _, client, ft = caller
    chunks = client.chat.completions.create(model="tiny-base", messages=ASK, stream=True)
    assert [c.choices[0].delta.content for c in chunks] == ["hel", "lo"]
    assert list(ft.chat.stream(model="tiny-base", messages=ASK)) == ["hel", "lo"]


def test_a_caller_that_hangs_up_ends_the_generation(caller: tuple[str, openai.OpenAI, FtClient], engine: FastAPI) -> None:
    _, client, _ = caller
    with client.chat.completions.create(model="tiny-base", messages=ASK, stream=True, max_tokens=999) as chunks:
        next(iter(chunks))
    assert engine.state.hung_up.wait(timeout=60)


def test_each_answer_that_a_request_asks_for_counts(served: tuple[Platform, str]) -> None:
    """512 for a tenant, in any number of requests that its tier allows."""
    platform, url = served
    tenant, other = (tenants.create(platform, f"t-{uuid.uuid4().hex[:8]}", tier="premium") for _ in range(2))
    with contextlib.ExitStack() as stack:
        mine, theirs = (
            stack.enter_context(openai.OpenAI(base_url=f"{url}/v1", api_key=key.secret, max_retries=0)) for key in (tenant[1], other[1])
        )

        def ask(client: openai.OpenAI, n: int) -> None:
            stream = client.chat.completions.create(model="tiny-base", messages=ASK, n=n, stream=True, max_tokens=999)
            next(iter(stack.enter_context(stream)))

        for _ in range(31):
            ask(mine, 16)
        ask(mine, 15)
        with pytest.raises(
            openai.RateLimitError, match=f"512 answers are under way for all requests of {tenant[0].id}, the limit"
        ) as refused:
            ask(mine, 2)
        assert refused.value.code == "too_many_in_flight"
        ask(mine, 1)
        ask(theirs, 16)


def test_answers_in_flight_are_limited_by_key_and_tenant(served: tuple[Platform, str], engine: FastAPI) -> None:
    """A free tenant has 8 answers under way, and each of its keys 6."""
    platform, url = served
    tenant, other = (tenants.create(platform, f"t-{uuid.uuid4().hex[:8]}", tier="free") for _ in range(2))
    second = tenants.create_key(platform, tenant[0].id, name="second", scopes=["read"])
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(openai.OpenAI(base_url=f"{url}/v1", api_key=key.secret, max_retries=0))
            for key in (tenant[1], second, other[1])
        ]

        def open_stream(client: openai.OpenAI) -> openai.Stream[Any]:
            stream = client.chat.completions.create(model="tiny-base", messages=ASK, stream=True, max_tokens=999)
            next(iter(stream))
            return stack.enter_context(stream)

        streams = [open_stream(clients[0]) for _ in range(6)]
        with pytest.raises(openai.RateLimitError, match=f"6 answers are under way for {tenant[1].id}, the limit") as refused:
            open_stream(clients[0])
        assert refused.value.code == "too_many_in_flight"
        assert refused.value.response.headers["retry-after"] == "1"
        assert "x-should-retry" not in refused.value.response.headers
        open_stream(clients[1])
        open_stream(clients[1])
        with pytest.raises(openai.RateLimitError, match=f"8 answers are under way for {tenant[0].id}, the limit"):
            open_stream(clients[1])
        with pytest.raises(openai.RateLimitError):
            clients[1].responses.create(model="tiny-base", input="hi")
        open_stream(clients[2])
        assert engine.state.senders[-1] == (other[0].id, "1")
        assert not _answers(clients[0]) and not _answers(clients[1])
        streams[0].close()
        until(lambda: _answers(clients[0]))
        assert _answers(clients[1])


def _answers(client: openai.OpenAI) -> bool:
    try:
        return client.chat.completions.create(model="tiny-base", messages=ASK).choices[0].message.content == "hello"
    except openai.RateLimitError:
        return False


def test_a_caller_that_hangs_up_before_a_whole_answer_ends_the_servers_request(
    caller: tuple[str, openai.OpenAI, FtClient], engine: FastAPI
) -> None:
    _, client, _ = caller
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(model="tiny-base", messages=ASK, max_tokens=998, timeout=2)
    assert engine.state.gave_up.wait(timeout=20)


@pytest.mark.parametrize("older", [{"functions": [{"name": "f"}]}, {"function_call": "none"}])
def test_calls_in_openais_older_form_are_refused_at_the_gateway(
    caller: tuple[str, openai.OpenAI, FtClient], engine: FastAPI, older: dict[str, Any]
) -> None:
    _, client, _ = caller
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny-base", messages=ASK, extra_body={**older, "seed": 4711})
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", next(iter(older)))
    assert all(seen.get("seed") != 4711 for seen in engine.state.seen)


def test_an_adapter_in_production_answers_under_its_name_and_its_id(
    served: tuple[Platform, str], caller: tuple[str, openai.OpenAI, FtClient], engine: FastAPI
) -> None:
    tenant, client, _ = caller
    name = f"ft:tiny-base:{tenant}:bot:abc123"
    adapter_id = add_adapter(served[0], tenant, name=name, stage="production", loaded=True)
    for asked in (name, adapter_id):
        assert client.chat.completions.create(model=asked, messages=ASK).model == name
    assert engine.state.seen[-1]["model"] == name


def test_a_route_answers_the_same_caller_alike_and_names_the_version(
    served: tuple[Platform, str], caller: tuple[str, openai.OpenAI, FtClient]
) -> None:
    tenant, client, ft = caller
    names = [f"ft:tiny-base:{tenant}:bot:{n}" for n in ("one", "two")]
    ids = [add_adapter(served[0], tenant, name=name, stage="production", loaded=True) for name in names]
    made = ft.model_routes.set("support", {ids[0]: 1, names[1]: 1})
    assert [(t["model"], t["share"]) for t in made["targets"]] == [(name, 0.5) for name in names]
    assert (ft.model_routes.retrieve("support"), [r["name"] for r in ft.model_routes.list().all()]) == (made, ["support"])
    assert "support" in [m.id for m in client.models.list()]

    def version(**options: Any) -> str:
        return client.chat.completions.create(model="support", messages=ASK, **options).model

    by_user = {f"u{n}": version(user=f"u{n}") for n in range(12)}
    assert set(by_user.values()) == set(names)
    assert {user: version(user=user) for user in by_user} == by_user
    assert {version(user="u1", extra_headers={"x-session-id": str(n)}) for n in range(12)} == {by_user["u1"]}
    assert {version(extra_headers={"x-session-id": str(n)}) for n in range(12)} == set(names)
    assert len({version() for _ in range(4)}) == 1, "one conversation"
    raw = client.chat.completions.with_raw_response.create(model="support", messages=ASK, user="u1")
    assert raw.headers["x-ft-model"] == by_user["u1"]
    assert raw.headers["x-ft-adapter"] == ids[names.index(by_user["u1"])]
    ft.model_routes.delete("support")
    with pytest.raises(openai.NotFoundError):
        version()
    with pytest.raises(InvalidRequest, match="outside 0") as refused:
        ft.model_routes.set("support", {ids[0]: -1})
    assert refused.value.code == "invalid_route"


def test_another_tenants_adapter_does_not_exist(served: tuple[Platform, str], caller: tuple[str, openai.OpenAI, FtClient]) -> None:
    _, client, ft = caller
    tenants.create(served[0], owner := f"o-{uuid.uuid4().hex[:8]}")
    name = f"ft:tiny-base:{owner}:bot:{uuid.uuid4().hex[:6]}"
    adapter_id = add_adapter(served[0], owner, name=name, stage="production", loaded=True)
    for asked in (name, adapter_id, "gpt-5"):
        with pytest.raises(openai.NotFoundError) as refused:
            client.chat.completions.create(model=asked, messages=ASK)
        assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
    for call in (ft.adapters.retrieve, ft.adapters.promote, ft.adapters.rollback, ft.adapters.deprecate):
        with pytest.raises(NotFound):
            call(adapter_id)
    assert ft.adapters.list().all() == []
    assert [m["id"] for m in ft.models.list().all()] == ["old-base", "tiny-base"]


def test_an_adapter_that_is_not_in_production_says_what_is_missing(
    served: tuple[Platform, str], caller: tuple[str, openai.OpenAI, FtClient]
) -> None:
    tenant, client, ft = caller
    name = f"ft:tiny-base:{tenant}:bot:draft1"
    adapter_id = add_adapter(served[0], tenant, name=name, stage="draft", loaded=False)
    with pytest.raises(openai.ConflictError, match="promote") as refused:
        client.chat.completions.create(model=name, messages=ASK)
    assert refused.value.code == "model_not_served"
    assert [m.id for m in client.models.list()] == ["old-base", "tiny-base", name]
    assert client.models.retrieve(name).owned_by == tenant
    shown = ft.adapters.retrieve(adapter_id)
    assert (shown["name"], shown["stage"], shown["observed"], shown["rank"]) == (name, "draft", "unloaded", 8)
    assert ft.adapters.retrieve(name) == shown


def test_a_refusal_of_the_engine_has_openais_form(caller: tuple[str, openai.OpenAI, FtClient]) -> None:
    _, client, ft = caller
    with pytest.raises(openai.BadRequestError, match="at least 1") as refused:
        client.chat.completions.create(model="tiny-base", messages=ASK, max_tokens=0)
    assert refused.value.code == "inference_refused"
    with pytest.raises(InvalidRequest, match="at least 1"):
        list(ft.chat.stream(model="tiny-base", messages=ASK, max_tokens=0))


def test_every_server_gets_messages_in_one_form(caller: tuple[str, openai.OpenAI, FtClient], engine: FastAPI) -> None:
    _, client, _ = caller
    schema = {"type": "object", "properties": {"reason": {"type": "string"}, "city": {"type": "string"}}}
    tool: Any = {"type": "function", "function": {"parameters": schema, "name": "weather"}}
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"reason":"asked","city":"K\\u00f6ln"}'}}
    messages: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "Weather?", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
    ]
    client.chat.completions.create(model="tiny-base", messages=messages, tools=[tool], extra_body={"enable_thinking": False}, temperature=0)
    seen = engine.state.seen[-1]
    assert seen["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?", "name": "ann"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{**call, "function": {"name": "weather", "arguments": '{"reason": "asked", "city": "Köln"}'}}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
    ]
    assert (seen["chat_template_kwargs"], seen["temperature"]) == ({"enable_thinking": False, "tools": [tool]}, 0)
    assert list(seen["chat_template_kwargs"]["tools"][0]["function"]["parameters"]["properties"]) == ["reason", "city"]
    assert "enable_thinking" not in seen
    assert normalize_request(seen) == seen


def test_unknown_field_of_a_message_reaches_no_server(caller: tuple[str, openai.OpenAI, FtClient], engine: FastAPI) -> None:
    _, client, _ = caller
    before = len(engine.state.seen)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny-base", messages=[*ASK, {"role": "user", "content": "a", "mood": "b"}])
    assert (refused.value.code, refused.value.param) == ("unknown_parameter", "messages[1].mood")
    assert len(engine.state.seen) == before


def test_a_failure_of_the_engine_is_unavailable(caller: tuple[str, openai.OpenAI, FtClient]) -> None:
    _, client, _ = caller
    with pytest.raises(openai.InternalServerError) as failed:
        client.chat.completions.create(model="tiny-base", messages=ASK, max_tokens=666)
    assert (failed.value.status_code, failed.value.code) == (503, "inference_unavailable")


def test_without_a_replica_inference_is_unavailable(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as failed:
        client.with_options(max_retries=0).chat.completions.create(model="tiny-base", messages=ASK)
    assert failed.value.code == "inference_unavailable"


def test_a_model_must_be_named(client: openai.OpenAI, api_url: str, api_key: str) -> None:
    answer = httpx.post(f"{api_url}/v1/chat/completions", headers={"authorization": f"Bearer {api_key}"}, json={"messages": ASK})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
