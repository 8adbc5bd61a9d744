"""Kinds of request: what floods the platform, and what the tenant beside it does meanwhile.

A scenario's `shoot` sends one request of the loud tenant; each connection of the flood repeats it with numbers that count up. Its `work` is
one piece of the quiet tenant's normal work of the same kind, and asserts that the answers are right.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.abuse.world import World

MODEL = "demo-llama-3m"
QUESTION = [{"role": "user", "content": "Where is my parcel?"}]
ASK = {"model": MODEL, "messages": QUESTION, "max_tokens": 8, "temperature": 0}
SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["late", "lost"]}}, "required": ["kind"], "additionalProperties": False}
ASK_JSON = {**ASK, "max_tokens": 24, "response_format": {"type": "json_schema", "json_schema": {"name": "kind", "schema": SCHEMA}}}
CHAT, GRADE = "/v1/chat/completions", "/v1/fine_tuning/alpha/graders/run"
ROWS = "".join(
    json.dumps({"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]}) + "\n" for n in range(40)
)
JOB = {"model": MODEL, "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 1}}}, "seed": 7}
PAGES = ("/console", "/console/jobs", "/console/datasets", "/console/usage", "/console/models", "/console/queue")

Shoot = Callable[[httpx.AsyncClient, World, int], Awaitable[httpx.Response | int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    shoot: Shoot
    work: Callable[[httpx.Client, World], None]
    connections: int = 100


def ok(answer: httpx.Response) -> Any:
    assert answer.is_success, f"{answer.request.url.path}: {answer.status_code} {answer.text[:300]}"
    return answer.json()


# Answers of models.


async def _long_stream(client: httpx.AsyncClient, _: World, nth: int) -> httpx.Response:
    long = [{"role": "user", "content": f"{nth}: " + "Where is my parcel? " * 40}]
    body = {"model": MODEL, "messages": long, "max_tokens": 200, "temperature": 1, "stream": True, "logit_bias": {"2": -100}}
    return await client.post(CHAT, json=body)


def _answered(client: httpx.Client, world: World) -> None:
    assert ok(client.post(CHAT, json=ASK))["choices"][0]["message"]["content"] == world.answer


def _fields(nth: int) -> Mapping[str, Any]:
    """A request with one kind of field at its limit; each has another schema, so that none is compiled before."""
    properties = {f"field_{nth}_{i}": {"type": "string", "pattern": "^[a-z]{1,40}(-[0-9]{1,20})*$"} for i in range(300)}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    kinds: tuple[Mapping[str, Any], ...] = (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "wide", "schema": schema}}},
        {"logit_bias": {str(token): -1 for token in range(1024)}, "logprobs": True, "top_logprobs": 20},
        {"stop": [f"{i:03d}" * 80 for i in range(16)]},
        {"tools": [
            {"type": "function", "function": {"name": f"tool_{nth}_{i}", "parameters": {**schema, "properties": {}, "required": []}}}
            for i in range(128)
        ]},
        {"n": 16},
    )  # fmt: skip
    return kinds[nth % len(kinds)]


async def _heavy_fields(client: httpx.AsyncClient, _: World, nth: int) -> httpx.Response:
    return await client.post(CHAT, json={"model": MODEL, "messages": QUESTION, "max_tokens": 64, "temperature": 1, **_fields(nth)})


def _answered_in_form(client: httpx.Client, world: World) -> None:
    answer = ok(client.post(CHAT, json=ASK_JSON))["choices"][0]["message"]["content"]
    assert answer == world.answer_json and json.loads(answer)["kind"] in ("late", "lost")


# Files.


async def _uploads(client: httpx.AsyncClient, world: World, nth: int) -> httpx.Response | int:
    if nth % 3 == 0:
        form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="half.jsonl"\r\n\r\n' + ROWS.encode() * 200
        return await half_sent(world, "/v1/files", world.loud_key, form, content_type="multipart/form-data; boundary=x")
    rows = ROWS.replace("?", f" {nth}?") * (1 if nth % 3 == 1 else 200)
    return await client.post("/v1/files", data={"purpose": "fine-tune"}, files={"file": (f"{nth}.jsonl", rows.encode())})


def _uploaded(client: httpx.Client, _: World) -> None:
    file = ok(client.post("/v1/files", data={"purpose": "fine-tune"}, files={"file": ("quiet.jsonl", ROWS.encode())}))
    assert file["status"] == "processed" and file["bytes"] == len(ROWS.encode()), file
    assert client.get(f"/v1/files/{file['id']}/content").text == ROWS
    ok(client.delete(f"/v1/files/{file['id']}"))


# Jobs.


async def _submissions(client: httpx.AsyncClient, world: World, nth: int) -> httpx.Response:
    job = {**JOB, "training_file": world.loud_file, "seed": nth}
    preview = {"model": MODEL, "training_file": world.loud_file, "num_examples": 100}
    path, body = (
        ("/v1/fine_tuning/estimate", job), ("/v1/fine_tuning/preview", preview), ("/v1/fine_tuning/jobs", job),
    )[nth % 3]  # fmt: skip
    answer = await client.post(path, json=body)
    if path.endswith("jobs") and answer.is_success:
        return await client.post(f"{path}/{answer.json()['id']}/cancel")
    return answer


def _submitted(client: httpx.Client, world: World) -> None:
    body = {**JOB, "training_file": world.quiet_file}
    assert ok(client.post("/v1/fine_tuning/estimate", json=body))["num_gpus"] == 1
    shown = ok(client.post("/v1/fine_tuning/preview", json={"model": MODEL, "training_file": world.quiet_file, "num_examples": 2}))
    assert len(shown["data"]) == 2
    job = ok(client.post("/v1/fine_tuning/jobs", json={**body, "force": True}))
    assert ok(client.post(f"/v1/fine_tuning/jobs/{job['id']}/cancel"))["status"] == "cancelled"


# Reading.

READS = (
    "/v1/fine_tuning/jobs?limit=100", "/v1/fine_tuning/jobs?limit=100&metadata[team]=team-3", "/v1/files?limit=10000", "/v1/usage",
    "/v1/ledger/entries?limit=100", "/v1/audit_log?limit=100", "/v1/models", "/v1/queue", "/v1/data_export", "/v1/fine_tuning/model_limits",
)  # fmt: skip


async def _reads(client: httpx.AsyncClient, world: World, nth: int) -> httpx.Response:
    if nth % 4 == 0:
        return await client.get(f"/v1/fine_tuning/jobs/{world.loud_job}/events?stream=true")
    return await client.get(READS[nth % len(READS)])


def _read(client: httpx.Client, world: World) -> None:
    assert world.quiet_job in [job["id"] for job in ok(client.get("/v1/fine_tuning/jobs?limit=100"))["data"]]
    assert ok(client.get(f"/v1/fine_tuning/jobs/{world.quiet_job}"))["training_file"] == world.quiet_file
    assert [file["id"] for file in ok(client.get("/v1/files"))["data"]] == [world.quiet_file]


# Callers without a key.


async def half_sent(world: World, path: str, key: str, part: bytes, *, content_type: str = "application/json") -> int:
    """Send a head and `part` of a body of three times its length, and wait; return the status of the answer."""
    address = urlsplit(world.url)
    lines = (f"POST {path} HTTP/1.1", f"Host: {address.netloc}", f"Content-Type: {content_type}", f"Content-Length: {3 * len(part)}")
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write("\r\n".join((*lines, f"Authorization: Bearer {key}", "", "")).encode() + part)
        await writer.drain()
        return int((await reader.readuntil(b"\r\n")).split()[1])
    finally:
        writer.close()


async def _strangers(client: httpx.AsyncClient, world: World, nth: int) -> httpx.Response | int:
    key = f"ft-sk-unknown-{nth}"
    if nth % 3 == 0:  # a connection that is held open and says nothing
        address = urlsplit(world.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            await reader.read()  # until the server closes it
        finally:
            writer.close()
        return 0
    if nth % 3 == 1:
        return await half_sent(world, CHAT, key, b'{"model": "' + b"a" * (300 << 10))
    return await client.get("/v1/files", headers={"authorization": f"Bearer {key}"})


# What is begun and takes long to end.


async def _unfinished(client: httpx.AsyncClient, world: World, nth: int) -> httpx.Response | int:
    if nth % 2:
        return await half_sent(world, CHAT, world.loud_key, b'{"model": "' + b"a" * (1 << 20))
    async with client.stream("GET", "/v1/data_export") as answer:
        if answer.status_code != 200:
            await answer.aread()
            return answer
        async for _ in answer.aiter_raw():
            await asyncio.sleep(0.2)
    return answer


# Graders, webhooks, the console.


async def _grades(client: httpx.AsyncClient, _: World, nth: int) -> httpx.Response:
    leaf = {"type": "text_similarity", "input": "{{item.a}}", "reference": "{{sample.output_text}}", "evaluation_metric": "rouge_l"}
    graders = {f"g{i}": {**leaf, "name": f"g{i}"} for i in range(10)}
    grader = {"type": "multi", "name": "all", "graders": graders, "calculate_output": " + ".join(graders)}
    words = [" ".join(f"w{(i * 7 + nth + shift) % 97}" for i in range(5000))[:19_900] for shift in (0, 3)]
    return await client.post(GRADE, json={"grader": grader, "item": {"a": words[0]}, "model_sample": words[1]})


def _graded(client: httpx.Client, _: World) -> None:
    grader = {"type": "string_check", "name": "same", "input": "{{item.a}}", "reference": "{{sample.output_text}}", "operation": "eq"}
    assert ok(client.post(GRADE, json={"grader": grader, "item": {"a": "x"}, "model_sample": "x"}))["reward"] == 1.0


async def _hanging_webhooks(client: httpx.AsyncClient, world: World, _: int) -> httpx.Response:
    return await client.post(f"/v1/webhook_endpoints/{world.loud_endpoint}/test")


def _webhook_sent(client: httpx.Client, world: World) -> None:
    assert ok(client.post(f"/v1/webhook_endpoints/{world.quiet_endpoint}/test"))["status_code"] == 200


async def _pages(client: httpx.AsyncClient, world: World, nth: int) -> httpx.Response:
    headers = {"authorization": "", "accept": "text/html", "cookie": f"ft_session={world.loud_session}"}
    return await client.get(PAGES[nth % len(PAGES)], headers=headers)


def _page_shown(client: httpx.Client, world: World) -> None:
    headers = {"authorization": "", "accept": "text/html", "cookie": f"ft_session={world.quiet_session}"}
    for path in ("/console", f"/console/jobs/{world.quiet_job}"):
        answer = client.get(path, headers=headers)
        assert answer.status_code == 200 and world.quiet_job in answer.text, (path, answer.status_code)


SCENARIOS: Mapping[str, Scenario] = {
    "long streams": Scenario(shoot=_long_stream, work=_answered, connections=150),
    "heavy fields": Scenario(shoot=_heavy_fields, work=_answered_in_form),
    "uploads": Scenario(shoot=_uploads, work=_uploaded, connections=60),
    "reads": Scenario(shoot=_reads, work=_read, connections=150),
    "strangers": Scenario(shoot=_strangers, work=_answered, connections=300),
    "unfinished": Scenario(shoot=_unfinished, work=_answered, connections=150),
    "graders": Scenario(shoot=_grades, work=_graded),
    "webhooks": Scenario(shoot=_hanging_webhooks, work=_webhook_sent),
    "pages": Scenario(shoot=_pages, work=_page_shown),
    "submissions": Scenario(shoot=_submissions, work=_submitted),  # last: its jobs push the one of the others off the first page
}
