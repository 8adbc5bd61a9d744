"""What is left of a request when it is over: a line, counts and a span, and in none of them what was sent."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from prometheus_client import generate_latest

from control_plane.api.app import create_app
from control_plane.api.metrics.request_metrics import RequestMeter
from control_plane.api.middleware import UNMATCHED, RequestIds
from control_plane.jobs import service as jobs
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from core.telemetry import logs

PROMPT = "the patient in bed nine has asked for her letters"
CALLER = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.fixture
def lines() -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """Everything that this process logs meanwhile, down to debug, as the API writes it."""
    stream, root = io.StringIO(), logging.getLogger()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.JsonLines("ft-api"))
    before = {name: logging.getLogger(name).level for name in ("", *logs.QUIET, *logs.PACKAGES)}
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    as_in_its_own_process = {**logs.QUIET, **dict.fromkeys(logs.PACKAGES, logging.NOTSET)}  # the caller's client would log its URLs
    for name, level in as_in_its_own_process.items():
        logging.getLogger(name).setLevel(level)

    def read(logger: str = "") -> list[dict[str, Any]]:
        return [line for text in stream.getvalue().splitlines() if (line := json.loads(text))["logger"].startswith(logger)]

    yield read
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)
    root.removeHandler(handler)


@pytest.fixture
def served(platform: Platform) -> Iterator[TestClient]:
    with TestClient(create_app(platform), base_url="http://localhost") as client:
        yield client


ACCESS = "control_plane.api.access"


def test_a_request_is_one_line_with_its_template_and_whose_it_was(
    served: TestClient, tenant: Any, api_key: str, lines: Callable[..., list[dict[str, Any]]]
) -> None:
    headers = {"authorization": f"Bearer {api_key}", "traceparent": CALLER}
    answer = served.get("/v1/files/file-wanted?after=some-secret", headers=headers)
    (line,) = lines(ACCESS)
    known = {k: line[k] for k in ("level", "method", "route", "status", "bytes", "tenant", "code", "trace_id", "service")}
    assert known == {
        "level": "info",
        "method": "GET",
        "route": "/v1/files/{file_id}",
        "status": 404,
        "bytes": len(answer.content),
        "tenant": tenant.id,
        "code": answer.json()["error"]["code"],
        "trace_id": "a" * 32,
        "service": "ft-api",
    }
    assert line["request_id"] == answer.headers["x-request-id"]
    assert line["key"].startswith("key")
    assert line["duration_ms"] >= line["first_byte_ms"] > 0
    assert "file-wanted" not in json.dumps(line)
    assert "some-secret" not in json.dumps(line)


def test_probes_are_logged_at_debug_and_not_counted(served: TestClient, lines: Callable[..., list[dict[str, Any]]]) -> None:
    assert served.get("/healthz").status_code == 200
    (line,) = lines(ACCESS)
    assert (line["level"], line["route"]) == ("debug", "/healthz")
    assert 'route="/healthz"' not in exposed(served.app)


def exposed(app: Any) -> str:
    return generate_latest(app.state.meter.registry).decode()


def test_nothing_that_was_sent_is_in_any_line(
    served: TestClient, platform: Platform, api_key: str, lines: Callable[..., list[dict[str, Any]]]
) -> None:
    headers = {"authorization": f"Bearer {api_key}"}
    rows = json.dumps({"messages": [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": PROMPT}]}) + "\n"
    served.post("/v1/files", headers=headers, files={"file": ("rows.jsonl", rows * 20)}, data={"purpose": "fine-tune"})
    served.post("/v1/chat/completions", headers=headers, json={"model": "none", "messages": [{"role": "user", "content": PROMPT}]})
    served.post("/v1/chat/completions", headers=headers, json={"model": PROMPT, "messages": PROMPT})
    served.post("/v1/fine_tuning/jobs", headers=headers, json={"model": "tiny-base", "training_file": PROMPT, "metadata": {"a": PROMPT}})
    served.get("/v1/models", headers={"authorization": "Bearer ft-sk-a-wrong-one-of-somebody"})
    served.get(f"/v1/files/{PROMPT}", headers=headers, params={"after": PROMPT})
    served.get(f"/{PROMPT}")
    sent = (api_key, api_key[6:], PROMPT, PROMPT.replace(" ", "%20"), "a-wrong-one")
    assert [line for line in lines() if any(secret in json.dumps(line) for secret in sent)] == []
    assert len(lines(ACCESS)) == 7


def test_code_that_breaks_is_answered_logged_and_counted_once(lines: Callable[..., list[dict[str, Any]]]) -> None:
    app = FastAPI()
    meter = RequestMeter()

    @app.get("/things/{thing}")
    def broken(thing: str) -> None:
        raise RuntimeError("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw did not fit")

    app.add_middleware(RequestIds, meter=meter)
    with TestClient(app) as client:
        answer = client.get("/things/of-somebody")
    assert answer.json()["error"]["code"] == "server_error"
    (failure,), (line,) = lines("control_plane.api.middleware"), lines(ACCESS)
    assert (line["status"], line["code"], line["request_id"]) == (500, "server_error", answer.headers["x-request-id"])
    assert failure["message"] == "GET /things/{thing} failed"
    assert failure["request_id"] == line["request_id"]
    assert "RuntimeError: whsec_*** did not fit" in failure["exception"]
    assert "of-somebody" not in failure["message"]
    counted = generate_latest(meter.registry).decode()
    assert 'ft_api_requests_total{method="GET",route="/things/{thing}",status="5xx"} 1.0' in counted
    assert 'ft_api_errors_total{code="server_error"} 1.0' in counted
    assert "ft_api_requests_in_flight 0.0" in counted


def test_a_caller_who_leaves_in_the_middle_of_a_body_is_no_error_of_the_server(lines: Callable[..., list[dict[str, Any]]]) -> None:
    app, sent = FastAPI(), list[Any]()
    app.add_middleware(RequestIds)

    @app.post("/read")
    async def read(request: Request) -> int:
        return len(await request.body())

    arriving = iter([{"type": "http.request", "body": b"half", "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(arriving)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/read", "raw_path": b"/read", "query_string": b"", "headers": [], "root_path": ""}
    asyncio.run(app(scope, receive, send))
    assert sent == [], "there is nobody to answer"
    assert [(line["level"], line["status"], line["route"]) for line in lines(ACCESS)] == [("info", 499, "/read")]
    assert lines("control_plane.api.middleware") == []


def test_every_route_is_counted_under_its_template_and_nothing_under_what_was_asked(served: TestClient) -> None:
    paths = served.app.openapi()["paths"]  # type: ignore[attr-defined]
    asked = sorted(
        (path, method) for path, item in paths.items() for method in item if path not in ("/livez", "/healthz", "/readyz", "/metrics")
    )
    for path, method in asked:
        served.request(method, re.sub(r"{[^}]*}", "an-id", path))
    served.request("BREW", "/v1/coffee-of-somebody")
    text = exposed(served.app)
    routes = set(re.findall(r'ft_api_requests_total{method="[^"]*",route="([^"]*)"', text))
    assert routes == {path for path, _ in asked} | {UNMATCHED}
    assert len(routes) > 50, "the document was walked"
    assert "an-id" not in text
    assert "coffee" not in text
    assert 'method="BREW"' not in text
    assert 'ft_api_authentication_failures_total{code="missing_api_key"}' in text


def test_a_streams_duration_is_that_of_its_first_byte(lines: Callable[..., list[dict[str, Any]]]) -> None:
    from starlette.responses import StreamingResponse

    app, meter = FastAPI(), RequestMeter()

    @app.get("/stream")
    def stream() -> StreamingResponse:
        return StreamingResponse(iter([b"x" * 10] * 3))

    app.add_middleware(RequestIds, meter=meter)
    with TestClient(app) as client:
        client.get("/stream")
    (line,) = lines(ACCESS)
    assert line["bytes"] == 30
    assert line["first_byte_ms"] <= line["duration_ms"]


def test_a_job_remembers_the_trace_of_the_request_that_made_it(
    platform: Platform, write_chat_rows: Callable[..., Any], served: TestClient
) -> None:
    owner, key = tenants.create(platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    headers = {"authorization": f"Bearer {key.secret}", "traceparent": CALLER}
    with write_chat_rows().open("rb") as rows:
        file = served.post("/v1/files", headers=headers, files={"file": ("rows.jsonl", rows)}, data={"purpose": "fine-tune"}).json()
    made = served.post("/v1/fine_tuning/jobs", headers=headers, json={"model": "tiny-base", "training_file": file["id"]}).json()
    assert jobs.get(platform, owner.id, made["id"]).job.trace_parent == CALLER
