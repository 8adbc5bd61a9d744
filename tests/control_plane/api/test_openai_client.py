"""Every call that OpenAI's client has for what the platform offers, synchronous and asynchronous, against a running server."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import threading
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from operator import attrgetter
from pathlib import Path
from typing import Any

import openai
import pytest
import sqlalchemy as sa
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.types import ASGIApp, Receive, Scope, Send

from control_plane.api.app import create_app
from control_plane.attempts.tables import checkpoints
from control_plane.platform.context import Platform
from control_plane.tenants.rules import Tenant
from tests.control_plane.api import openai_calls
from tests.control_plane.jobs.test_jobs import move
from tests.support.jobs.registered_adapter import add_adapter
from tests.support.platform.background_worker import working
from tests.support.platform.fleet_in_memory import Servers

ANSWER = '{"city": "Paris"}'


class Recorded:
    """An application, and the requests that it was sent."""

    def __init__(self, app: ASGIApp) -> None:
        self.app, self.requests = app, list[tuple[str, str]]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self.requests.append((scope["method"], scope["path"]))
        await self.app(scope, receive, send)


def inference_server() -> FastAPI:
    """Answers everything with :data:`ANSWER`, streamed or not."""
    app = FastAPI()

    @app.post("/v1/{kind:path}")
    async def answer(kind: str, request: Request) -> Response:
        body = await request.json()
        about = {"id": "answer-0", "created": 1, "model": body["model"]}
        if kind == "completions":
            choice: dict[str, Any] = {"text": ANSWER}
        else:
            choice = {"delta" if body.get("stream") else "message": {"role": "assistant", "content": ANSWER}}
        whole = {**about, "object": "chat.completion", "choices": [{"index": 0, "finish_reason": "stop", **choice}]}
        if body.get("stream"):
            whole["object"] = "chat.completion.chunk"
            return Response(f"data: {json.dumps(whole)}\n\ndata: [DONE]\n\n", media_type="text/event-stream")
        return JSONResponse({**whole, "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}})

    return app


@pytest.fixture(scope="module")
def platform(new_platform: Callable[..., Platform], serve: Callable[[ASGIApp], str]) -> Platform:
    """Webhooks may go to this machine."""
    url = serve(inference_server())
    made = new_platform(webhook_allow="127.0.0.0/8", inference_urls=url)
    fleet = Servers(url)
    fleet.at[url].digest = made.models.get("tiny-base").digest
    return replace(made, fleet=fleet)


@pytest.fixture(scope="module")
def recorded(platform: Platform) -> Recorded:
    return Recorded(create_app(platform))


@pytest.fixture(scope="module")
def api_url(platform: Platform, recorded: Recorded, serve: Callable[[ASGIApp], str]) -> Iterator[str]:
    with working(platform):
        yield serve(recorded)


@dataclass
class Driver:
    """Calls a client of either kind, and remembers what it called and what that sent."""

    client: Any
    recorded: Recorded
    called: set[str] = field(default_factory=set)

    async def __call__(self, call: str, *args: Any, **kwargs: Any) -> Any:
        """The result of a call, whose requests are those of its row in the documentation."""
        target = self.client
        for name in call.split("."):
            target = getattr(target, name)
        before = len(self.recorded.requests)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # OpenAI's word on its own methods
            result = await opened(await settled(target(*args, **kwargs)))
        route, sent = openai_calls.documented()[call], self.recorded.requests[before:]
        assert (not sent) if route is None else openai_calls.is_route(route, sent[-1]), f"{call} sent {sent}, documented is {route}"
        self.called.add(call)
        return result

    async def everything(self, page: Any) -> list[Any]:
        """All items, page after page."""
        return [item async for item in page] if hasattr(page, "__aiter__") else list(page)


@pytest.fixture(params=["sync", "async"])
def driven(request: pytest.FixtureRequest, recorded: Recorded, api_url: str, api_key: str) -> Callable[..., None]:
    """Runs a scenario with a client of one kind."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Any]:
        settings: dict[str, Any] = {"base_url": f"{api_url}/v1", "api_key": api_key}
        if request.param == "async":
            async with openai.AsyncOpenAI(**settings) as client:
                yield client
        else:
            with openai.OpenAI(**settings) as other:
                yield other

    def run(scenario: Callable[[Driver], Awaitable[None]], *calls: str) -> None:
        async def main() -> None:
            async with opened() as client:
                driver = Driver(client, recorded)
                await scenario(driver)
                assert driver.called == {c for c in openai_calls.documented() if c.startswith(calls)}, "the scenario makes every call"

        asyncio.run(main())

    return run


def rows(num_rows: int = 120) -> bytes:
    turns = ([("user", f"What is {i} plus {i}?"), ("assistant", f"It is {2 * i}.")] for i in range(num_rows))
    return b"".join(json.dumps({"messages": [{"role": r, "content": c} for r, c in turn]}).encode() + b"\n" for turn in turns)


def test_the_table_of_calls_is_what_the_installed_client_has() -> None:
    documented, not_offered = set(openai_calls.documented()), openai_calls.not_offered()
    assert not documented & not_offered
    for client in (openai.OpenAI(api_key="none"), openai.AsyncOpenAI(api_key="none")):
        assert documented | not_offered == openai_calls.of_client(client)


def test_files(driven: Callable[..., None]) -> None:
    async def scenario(call: Driver) -> None:
        content = rows()
        made = [await call("files.create", file=(f"{i}.jsonl", content + b"\n" * i), purpose="fine-tune") for i in range(3)]
        assert {f.object for f in made} == {"file"}
        assert (await call("files.wait_for_processing", made[0].id, poll_interval=0.01)).status == "processed"
        assert (await call("files.retrieve", made[0].id)).filename == "0.jsonl"
        listed = await call.everything(await call("files.list", limit=1, order="asc", purpose="fine-tune"))
        assert [f.id for f in listed] == [f.id for f in made]
        assert (await call("files.content", made[0].id)).content == content
        assert await call("files.retrieve_content", made[0].id) == content.decode()
        gone = await call("files.delete", made[0].id)
        assert (gone.id, gone.deleted, gone.object) == (made[0].id, True, "file")
        with pytest.raises(openai.NotFoundError):
            await call("files.retrieve", made[0].id)

    driven(scenario, "files.")


def test_uploads(driven: Callable[..., None], tmp_path: Path) -> None:
    async def scenario(call: Driver) -> None:
        content = rows(300)
        asked = {"bytes": len(content), "filename": "big.jsonl", "mime_type": "application/jsonl", "purpose": "fine-tune"}
        upload = await call("uploads.create", **asked)
        assert (upload.object, upload.status, upload.bytes) == ("upload", "pending", len(content))
        halves = [content[: len(content) // 2], content[len(content) // 2 :]]
        parts = [await call("uploads.parts.create", upload.id, data=half) for half in halves]
        assert {(p.object, p.upload_id) for p in parts} == {("upload.part", upload.id)}
        md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
        done = await call("uploads.complete", upload.id, part_ids=[p.id for p in parts], md5=md5)
        assert (done.status, done.file.filename, done.file.bytes) == ("completed", "big.jsonl", len(content))
        assert (await call("uploads.cancel", (await call("uploads.create", **asked)).id)).status == "cancelled"
        path = tmp_path / "chunked.jsonl"
        path.write_bytes(content)
        chunked = await call(
            "uploads.upload_file_chunked", file=path, mime_type="application/jsonl", purpose="fine-tune", part_size=len(content) // 3
        )
        assert (chunked.status, chunked.file.bytes) == ("completed", len(content))

    driven(scenario, "uploads.")


def test_fine_tuning(driven: Callable[..., None], platform: Platform, tenant: Tenant) -> None:
    async def scenario(call: Driver) -> None:
        file = await settled(call.client.files.create(file=("t.jsonl", rows()), purpose="fine-tune"))
        asked = {"model": "tiny-base", "training_file": file.id}
        made = [await call("fine_tuning.jobs.create", **asked, seed=i, metadata={"n": str(i)}) for i in range(3)]
        ids = [job.id for job in made][::-1]
        assert [j.id for j in await call.everything(await call("fine_tuning.jobs.list", limit=2))] == ids
        assert [j.id for j in await call.everything(await call("fine_tuning.jobs.list", metadata={"n": "1"}))] == [ids[1]]
        await _one_job(call, platform, ids[0])
        await _one_checkpoint(call, tenant, ids[0])
        await _graders(call)

    driven(scenario, "fine_tuning.")


async def _one_job(call: Driver, platform: Platform, job: str) -> None:
    move(platform, job, "queued")
    assert (await call("fine_tuning.jobs.pause", job)).status == "paused"
    assert (await call("fine_tuning.jobs.resume", job)).status == "queued"
    assert (await call("fine_tuning.jobs.cancel", job)).status == "cancelled"
    assert (await call("fine_tuning.jobs.retrieve", job)).finished_at is not None
    events = await call.everything(await call("fine_tuning.jobs.list_events", job, limit=2))
    assert [e.code for e in events] == ["job_cancelled", "job_resumed", "job_paused", "job_queued", "job_created"]
    with platform.engine.begin() as conn:
        for step in (1, 2, 3):
            row = {"id": f"ftckpt_{job}_{step}", "job_id": job, "attempt": 1, "step": step, "object_prefix": "p", "manifest_sha256": "0"}
            conn.execute(sa.insert(checkpoints).values(**row, metrics={"train_loss": 1.0}, created_at=platform.clock()))


async def _one_checkpoint(call: Driver, tenant: Tenant, job: str) -> None:
    found = await call.everything(await call("fine_tuning.jobs.checkpoints.list", job, limit=2))
    assert [c.step_number for c in found] == [3, 2, 1]
    permissions = "fine_tuning.checkpoints.permissions"
    for reference in (found[0].id, found[0].fine_tuned_model_checkpoint):
        granted = await call.everything(await call(f"{permissions}.create", reference, project_ids=[tenant.id]))
        assert [(p.object, p.project_id) for p in granted] == [("checkpoint.permission", tenant.id)], "a second time, the same one"
    with pytest.raises(openai.PermissionDeniedError, match="export its adapter") as refused:
        await call(f"{permissions}.create", found[0].id, project_ids=["proj_of_others"])
    assert refused.value.code == "project_not_allowed"
    listed = await call.everything(await call(f"{permissions}.list", found[0].id, limit=1, order="ascending"))
    assert [p.id for p in listed] == [granted[0].id]
    page = await call(f"{permissions}.retrieve", found[0].id, project_id=tenant.id)
    assert (page.first_id, page.last_id, page.has_more) == (granted[0].id, granted[0].id, False)
    gone = await call(f"{permissions}.delete", granted[0].id, fine_tuned_model_checkpoint=found[0].id)
    assert (gone.id, gone.deleted, gone.object) == (granted[0].id, True, "checkpoint.permission")
    with pytest.raises(openai.NotFoundError):
        await call(f"{permissions}.delete", granted[0].id, fine_tuned_model_checkpoint=found[0].id)


async def _graders(call: Driver) -> None:
    grader = {"type": "string_check", "name": "exact", "input": "{{sample.output_text}}", "reference": "{{item.answer}}", "operation": "eq"}
    assert (await call("fine_tuning.alpha.graders.validate", grader=grader)).grader.name == "exact"
    done = await call("fine_tuning.alpha.graders.run", grader=grader, item={"answer": "Paris"}, model_sample="Paris")
    assert (done.reward, done.metadata.scores, done.metadata.errors.invalid_variable_error) == (1.0, {"exact": 1.0}, False)
    with pytest.raises(openai.BadRequestError) as refused:
        await call("fine_tuning.alpha.graders.validate", grader={"type": "python", "name": "p", "source": "1"})
    assert (refused.value.code, refused.value.param) == ("unsupported_grader", "grader.type")


def test_models(driven: Callable[..., None], platform: Platform, tenant: Tenant) -> None:
    name = f"ft:tiny-base:{tenant.id}:with/slash:abc"
    adapter = add_adapter(platform, tenant.id, name=name, stage="production", loaded=True)

    async def scenario(call: Driver) -> None:
        listed = await call.everything(await call("models.list"))
        assert {"tiny-base", name} <= {m.id for m in listed} and {m.object for m in listed} == {"model"}
        assert (await call("models.retrieve", name)).adapter_id == adapter
        for _ in range(2):
            gone = await call("models.delete", name)
            assert (gone.id, gone.deleted, gone.object) == (name, True, "model")
        assert (await call("models.retrieve", name)).stage == "deprecated", "its files stay for the days of grace"
        with pytest.raises(openai.PermissionDeniedError, match="base model of the platform"):
            await call("models.delete", "tiny-base")
        with pytest.raises(openai.NotFoundError):
            await call("models.delete", "ft:tiny-base:somebody::x")

    driven(scenario, "models.")


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[tuple[bytes, dict[str, str]]]]]:
    """URL of a receiver, and what it received: bodies with their headers."""
    received: list[tuple[bytes, dict[str, str]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.rfile.read(int(self.headers["content-length"])), {k.lower(): v for k, v in self.headers.items()}))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/hook", received
        server.shutdown()
        thread.join()


def test_webhooks(driven: Callable[..., None], receiver: tuple[str, list[tuple[bytes, dict[str, str]]]]) -> None:
    url, received = receiver

    async def scenario(call: Driver) -> None:
        assert "fine_tuning.job.succeeded" in str(await call("webhooks.event_types.list"))
        made = await call("webhooks.create", name="mine", url=url, event_types=["fine_tuning.job.succeeded"])
        assert (made.object, made.signing_secret.startswith("whsec_")) == ("webhook_endpoint", True)
        assert (await call("webhooks.retrieve", made.id)).name == "mine"
        changed = await call("webhooks.update", made.id, name="ours", url=made.url, event_types=["fine_tuning.job.failed"])
        assert (changed.name, changed.event_types) == ("ours", ["fine_tuning.job.failed"])
        assert [w.id for w in await call.everything(await call("webhooks.list", limit=1))] == [made.id]
        secret = (await call("webhooks.rotate_secret", made.id)).signing_secret
        assert secret != made.signing_secret
        await call("webhooks.test", made.id, event_type="fine_tuning.job.succeeded")
        body, headers = received[-1]
        event = await call("webhooks.unwrap", body, headers, secret=secret)
        assert (event.object, event.type) == ("event", "fine_tuning.job.succeeded")
        await call("webhooks.verify_signature", body, headers, secret=secret)
        with pytest.raises(openai.InvalidWebhookSignatureError):
            await call("webhooks.unwrap", body + b" ", headers, secret=secret)
        assert (await call("webhooks.delete", made.id)).deleted

    driven(scenario, "webhooks.")


class City(BaseModel):
    city: str


def test_answers(driven: Callable[..., None]) -> None:
    async def scenario(call: Driver) -> None:
        asked: dict[str, Any] = {"model": "tiny-base", "messages": [{"role": "user", "content": "Where is the tower?"}]}
        assert (await call("chat.completions.create", **asked)).choices[0].message.content == ANSWER
        chunks = await call.everything(await call("chat.completions.create", **asked, stream=True))
        assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == ANSWER
        assert (await call("chat.completions.parse", **asked, response_format=City)).choices[0].message.parsed == City(city="Paris")
        whole = await settled((await call("chat.completions.stream", **asked)).get_final_completion())
        assert whole.choices[0].message.content == ANSWER
        assert (await call("completions.create", model="tiny-base", prompt="The tower is in")).choices[0].text == ANSWER
        asked = {"model": "tiny-base", "input": "Where is the tower?"}
        assert (await call("responses.create", **asked)).output_text == ANSWER
        assert (await call("responses.parse", **asked, text_format=City)).output_parsed == City(city="Paris")
        final = await settled((await call("responses.stream", **asked)).get_final_response())
        assert final.output_text == ANSWER

    driven(scenario, "chat.", "completions.", "responses.")


def test_calls_that_are_not_offered_are_refused(api_url: str, api_key: str) -> None:
    with openai.OpenAI(base_url=f"{api_url}/v1", api_key=api_key, max_retries=0) as client:
        for call in openai_calls.not_offered() - {"responses.connect"}:  # a WebSocket
            method = attrgetter(call)(client)
            required = {p.name: "x" for p in inspect.signature(method).parameters.values() if p.default is p.empty}
            with pytest.raises(openai.APIStatusError) as refused:
                method(**required)
            assert refused.value.status_code in (404, 405), call


async def opened(result: Any) -> Any:
    """`result`, or the stream of a manager, which sends its request only when it is entered."""
    if hasattr(result, "__aenter__"):
        return await result.__aenter__()
    return result.__enter__() if hasattr(result, "__enter__") else result


async def settled(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def test_raw_and_streamed_answers(api_url: str, api_key: str) -> None:
    with openai.OpenAI(base_url=f"{api_url}/v1", api_key=api_key) as client:
        raw = client.models.with_raw_response.list()
        assert raw.headers["x-request-id"].startswith("req_")
        assert {"tiny-base"} <= {m.id for m in raw.parse()}
        file = client.files.create(file=("r.jsonl", rows()), purpose="fine-tune")
        with client.files.with_streaming_response.content(file.id) as streamed:
            assert b"".join(streamed.iter_bytes(1000)) == rows()

    async def streamed_too() -> None:
        async with openai.AsyncOpenAI(base_url=f"{api_url}/v1", api_key=api_key) as client:
            raw = await client.models.with_raw_response.retrieve("tiny-base")
            assert raw.parse().id == "tiny-base"
            async with client.files.with_streaming_response.content(file.id) as answer:
                assert await answer.read() == rows()

    asyncio.run(streamed_too())
