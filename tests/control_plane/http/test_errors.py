"""Refusals as OpenAI's client raises them: class, code, param, request id, and words that help."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp

from control_plane.api.app import create_app
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from core.errors import IntegrityError


def refusal(call: Callable[[], Any], kind: type[openai.APIStatusError]) -> openai.APIStatusError:
    with pytest.raises(kind) as refused:
        call()
    error = refused.value
    assert error.request_id is not None
    assert error.request_id.startswith("req_")
    body = error.response.json()["error"]
    assert sorted(body) == ["code", "message", "param", "type"]
    return error


@pytest.mark.parametrize("key", ["ft-sk-wrong", "sk-of-somebody-else", "x" * 5000])
def test_an_unknown_key_is_refused(api_url: str, key: str) -> None:
    with openai.OpenAI(base_url=f"{api_url}/v1", api_key=key) as client:
        error = refusal(client.models.list, openai.AuthenticationError)
    assert error.code == "invalid_api_key"
    assert key not in str(error), "a secret must not come back in a message"


@pytest.mark.parametrize("header", [None, "", "Bearer", "Basic dXNlcjpwYXNz"])
def test_no_key_is_refused(api_url: str, header: str | None) -> None:
    answer = httpx.get(f"{api_url}/v1/models", headers={} if header is None else {"authorization": header})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "missing_api_key")


def test_an_unknown_model_is_named_with_those_there_are(client: openai.OpenAI, training_file: str) -> None:
    error = refusal(lambda: client.fine_tuning.jobs.create(model="gpt-5", training_file=training_file), openai.NotFoundError)
    assert (error.code, error.param) == ("model_not_found", "model")
    assert "tiny-base" in str(error)


def test_a_deprecated_model_takes_no_new_jobs(client: openai.OpenAI, training_file: str) -> None:
    error = refusal(lambda: client.fine_tuning.jobs.create(model="old-base", training_file=training_file), openai.BadRequestError)
    assert error.code == "model_deprecated"


def test_a_job_without_its_dataset_is_refused(client: openai.OpenAI) -> None:
    error = refusal(lambda: client.fine_tuning.jobs.create(model="tiny-base", training_file="file-none"), openai.NotFoundError)
    assert (error.code, error.param) == ("file_not_found", "training_file")


def test_three_rows_are_too_few_to_train_on_and_enough_to_validate(
    client: openai.OpenAI, training_file: str, write_chat_rows: Callable[..., Path]
) -> None:
    small = client.files.create(file=write_chat_rows(3, name="small.jsonl"), purpose="fine-tune").id
    error = refusal(lambda: client.fine_tuning.jobs.create(model="tiny-base", training_file=small), openai.BadRequestError)
    assert (error.code, error.param) == ("invalid_training_file", "training_file")
    assert "3 good examples" in str(error)
    assert "at least 10" in str(error)
    job = client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file, validation_file=small)
    assert job.validation_file == small


def test_a_refused_file_makes_no_job_and_says_what_is_wrong_with_it(client: openai.OpenAI, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hello"}]}\n' * 3)
    file = client.files.create(file=path, purpose="fine-tune")
    error = refusal(lambda: client.fine_tuning.jobs.create(model="tiny-base", training_file=file.id), openai.BadRequestError)
    assert error.code == "invalid_training_file"
    assert "3 rows (1, 2, 3)" in str(error)
    assert f"/v1/datasets/{file.id}/report" in str(error)
    assert list(client.fine_tuning.jobs.list()) == []


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"seed": -1}, "invalid_seed", "seed"),
        ({"seed": "seven"}, "invalid_type", "seed"),
        ({"suffix": "x" * 65}, "invalid_suffix", "suffix"),
        ({"suffix": "a:b"}, "invalid_suffix", "suffix"),
        ({"metadata": {"a": 1}}, "invalid_type", "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "invalid_metadata", "metadata"),
        ({"method": "rlhf"}, "unsupported_method", "method"),
        ({"method": {"type": "reinforcement"}}, "unsupported_method", "method"),
        ({"method": {"type": "supervised", "dpo": {}}}, "unknown_parameter", "method.dpo"),
        ({"method": {"supervised": {}}}, "missing_required_parameter", "method.type"),
        ({"hyperparameters": {"n_epochs": -1}}, "invalid_hyperparameter", "hyperparameters.n_epochs"),
        ({"hyperparameters": {"epochs": 1}}, "invalid_hyperparameter", "hyperparameters.epochs"),
        ({"hyperparameters": {"max_seq_len": 4096}}, "invalid_hyperparameter", "hyperparameters.max_seq_len"),
        ({"hyperparameters": {"rank": 7}}, "invalid_hyperparameter", "hyperparameters.rank"),
        ({"recipe": "no-such-recipe"}, "invalid_recipe", "recipe"),
        ({"tier": "gold"}, "invalid_tier", "tier"),
        ({"tier": "premium"}, "tier_not_allowed", "tier"),
        ({"n_epochs": 3}, "unknown_parameter", "n_epochs"),
        ({"training_file": None}, "missing_required_parameter", "training_file"),
        ({"training_file": ""}, "missing_required_parameter", "training_file"),
    ],
)
def test_a_bad_field_is_refused_by_its_name(
    client: openai.OpenAI, training_file: str, fields: dict[str, Any], code: str, param: str | None
) -> None:
    create = client.fine_tuning.jobs.create
    error = refusal(lambda: create(model="tiny-base", training_file=training_file, extra_body=fields), openai.BadRequestError)
    assert (error.code, error.param) == (code, param)
    assert list(client.fine_tuning.jobs.list()) == []


def test_another_tenants_things_look_as_if_they_were_not_there(
    client: openai.OpenAI, platform: Platform, api_url: str, training_file: str
) -> None:
    job = client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file)
    dataset = client.files.retrieve(training_file).dataset_id
    _, key = tenants.create(platform, "stranger")
    with openai.OpenAI(base_url=f"{api_url}/v1", api_key=key.secret) as stranger:
        assert list(stranger.fine_tuning.jobs.list()) == []
        assert list(stranger.files.list()) == []
        calls: list[Callable[[], Any]] = [
            lambda: stranger.fine_tuning.jobs.retrieve(job.id),
            lambda: stranger.fine_tuning.jobs.cancel(job.id),
            lambda: stranger.fine_tuning.jobs.pause(job.id),
            lambda: stranger.fine_tuning.jobs.resume(job.id),
            lambda: list(stranger.fine_tuning.jobs.list_events(job.id)),
            lambda: list(stranger.fine_tuning.jobs.checkpoints.list(job.id)),
            lambda: stranger.files.retrieve(training_file),
            lambda: stranger.files.content(training_file),
            lambda: stranger.files.delete(training_file),
            lambda: stranger.fine_tuning.jobs.create(model="tiny-base", training_file=training_file),
            lambda: stranger.get(f"/datasets/{dataset}/report", cast_to=httpx.Response),
            lambda: stranger.get(f"/datasets/{training_file}/report", cast_to=httpx.Response),
            lambda: stranger.get(f"/fine_tuning/jobs/{job.id}/metrics", cast_to=httpx.Response),
            lambda: stranger.get(f"/fine_tuning/jobs/{job.id}/logs", cast_to=httpx.Response),
            lambda: stranger.get(f"/fine_tuning/jobs/{job.id}/events?stream=true", cast_to=httpx.Response),
        ]
        for call in calls:
            refusal(call, openai.NotFoundError)
        with pytest.raises(openai.BadRequestError):
            stranger.fine_tuning.jobs.list(after=job.id)
    assert client.fine_tuning.jobs.retrieve(job.id).status == "validating_files"


def test_an_error_of_an_absent_job_and_of_a_strangers_job_are_the_same_words(
    client: openai.OpenAI, platform: Platform, api_url: str
) -> None:
    messages = set()
    for job_id in ("ftjob-aaaaaaaa", "ftjob-bbbbbbbb"):
        error = refusal(lambda job_id=job_id: client.fine_tuning.jobs.retrieve(job_id), openai.NotFoundError)  # type: ignore[misc]
        messages.add(str(error.response.json()["error"]["message"]).replace(job_id, ""))
    assert len(messages) == 1


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [("GET", "/v1/nothing", 404, "unknown_url"), ("PUT", "/v1/models", 405, "method_not_allowed"), ("GET", "/nothing", 404, "unknown_url")],
)
def test_a_path_that_does_not_exist_is_answered_in_the_same_form(api_url: str, method: str, path: str, status: int, code: str) -> None:
    answer = httpx.request(method, f"{api_url}{path}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers["x-request-id"].startswith("req_")


LONG = "a" * 60_000


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "model_routes/support", {"targets": [{"model": "tiny-base", "weight": 1}], LONG: 1}),
        ("PUT", f"model_routes/{LONG}", {"targets": []}),
        ("POST", "fine_tuning/jobs", {"model": LONG, "training_file": LONG}),
        ("POST", "fine_tuning/jobs", {"model": "tiny-base", "training_file": "file-none", LONG: 1}),
        ("POST", "fine_tuning/jobs", {"model": "tiny-base", "training_file": "file-none", "metadata": {LONG: "\0"}}),
        ("POST", "fine_tuning/jobs", {"model": "tiny-base", "training_file": "file-none", "metadata": {LONG: 1}}),
        ("POST", "fine_tuning/jobs", {"model": "tiny-base", "training_file": "file-none", "hyperparameters": {LONG: 1}}),
        ("POST", "datasets/import", {"hub_id": "hf://a/b", "column_map": {LONG: "\0"}}),
        ("POST", "chat/completions", {"model": "tiny-base", "messages": [], LONG: 1}),
        ("POST", "api_keys", {"name": LONG, "scopes": [LONG]}),
        ("POST", "webhook_endpoints", {"name": "a", "url": LONG, "event_types": [LONG]}),
        ("GET", LONG, None),
        ("DELETE", f"models{LONG}", None),
    ],
)
def test_a_long_text_of_the_sender_is_repeated_only_in_part(api_url: str, api_key: str, method: str, path: str, body: Any) -> None:
    answer = httpx.request(method, f"{api_url}/v1/{path}", headers={"authorization": f"Bearer {api_key}"}, json=body)
    error = answer.json()["error"]
    assert 400 <= answer.status_code < 500 and len(error["message"]) <= 1000 and len(error["param"] or "") <= 200, error


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"{", "invalid_json"),
        (b"[]", "invalid_type"),
        (b"", "missing_required_parameter"),
        (b'{"model": "a"}', "missing_required_parameter"),
        (b"\xff\xfe", "invalid_json"),
        (b'"text"', "invalid_type"),
        (b"null", "invalid_type"),
    ],
)
def test_an_unreadable_body_is_a_bad_request(api_url: str, api_key: str, content: bytes, code: str) -> None:
    headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
    answer = httpx.post(f"{api_url}/v1/fine_tuning/jobs", headers=headers, content=content)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("fine_tuning/jobs", '"metadata": {"team": "a\\u0000"}', "nul_character", "metadata.team"),
        ("fine_tuning/jobs", '"metadata": {"a\\u0000": "b"}', "nul_character", "metadata.a\\u0000"),
        ("fine_tuning/jobs", '"suffix": "\\u0000"', "nul_character", "suffix"),
        ("fine_tuning/jobs", '"hardware": {"gpu": "\\ud800"}', "lone_surrogate", "hardware.gpu"),
        ("fine_tuning/jobs", '"hardware": {"gpus": NaN}', "non_finite_number", "hardware.gpus"),
        ("fine_tuning/jobs", '"\\ud800": 1', "invalid_type", None),
        ("fine_tuning/jobs", '"metadata": {"\\ud800": "b"}', "lone_surrogate", "metadata.\\ud800"),
        ("fine_tuning/jobs", f'"hyperparameters": {{"n_epochs": 1{"0" * 400}}}', "invalid_hyperparameter", "hyperparameters.n_epochs"),
        ("chat/completions", '"temperature": NaN', "non_finite_number", "temperature"),
        ("chat/completions", '"messages": [{"role": "user", "content": "\\ud800"}]', "lone_surrogate", "messages[0].content"),
        ("completions", '"prompt": "\\ud800"', "lone_surrogate", "prompt"),
        ("datasets/import", '"hub_id": "hf://a/b", "column_map": {"q\\u0000": "prompt"}', "nul_character", "column_map.q\\u0000"),
        ("datasets/import", '"hub_id": "hf://a/b", "rows_at": "a\\u0000"', "nul_character", "rows_at"),
        ("api_keys", '"name": "\\u0000"', "nul_character", "name"),
        ("api_keys", f'"name": "a", "expires_in": 1{"0" * 400}', "invalid_request", "expires_in"),
    ],
)
def test_what_cannot_be_stored_or_passed_on_is_refused_by_its_place(
    api_url: str, api_key: str, path: str, body: str, code: str, param: str | None
) -> None:
    headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
    named = "" if path == "api_keys" else '"model": "tiny-base", '
    named += '"training_file": "file-1", ' if path == "fine_tuning/jobs" else ""
    answer = httpx.post(f"{api_url}/v1/{path}", headers=headers, content=f"{{{named}{body}}}")
    assert answer.status_code == 400, answer.text
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == (code, param)


@pytest.mark.parametrize(
    "path",
    ["files/file-%00", "fine_tuning/jobs/%00", "adapters/%00", "models/a%00b", "datasets/%00/report", "files?after=%00",
     "fine_tuning/jobs?metadata[a]=%00"],
)  # fmt: skip
def test_a_nul_in_an_id_is_a_bad_request(api_url: str, api_key: str, path: str) -> None:
    answer = httpx.get(f"{api_url}/v1/{path}", headers={"authorization": f"Bearer {api_key}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_id")
    assert "NUL" in answer.json()["error"]["message"]


def test_a_nul_in_a_column_map_is_a_bad_request(api_url: str, api_key: str) -> None:
    answer = httpx.post(
        f"{api_url}/v1/files",
        headers={"authorization": f"Bearer {api_key}"},
        data={"purpose": "fine-tune", "column_map": '{"a\\u0000": "prompt"}'},
        files={"file": ("x.csv", b"a,b\n1,2\n")},
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "nul_character")


def test_a_failure_of_the_server_tells_its_caller_an_id_and_nothing_else(
    platform: Platform, serve: Callable[[ASGIApp], str], caplog: pytest.LogCaptureFixture
) -> None:
    app: FastAPI = create_app(platform)

    @app.get("/breaks")
    def breaks() -> None:
        raise RuntimeError("secret detail")

    @app.get("/torn")
    def torn() -> None:
        raise IntegrityError("secret path")

    url = serve(app)
    for path in ("/breaks", "/torn"):
        answer = httpx.get(url + path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "server_error")
        assert "secret" not in answer.text
        request_id = answer.headers["x-request-id"]
        assert request_id in answer.text
        # That the line holds the id is shown where lines are formatted: tests/control_plane/api/test_requests_watched.py.
        assert any(r.getMessage() == f"GET {path} failed" and r.exc_info for r in caplog.records), "the operator finds the trace"


def test_a_database_that_is_away_is_unavailable_and_worth_a_retry(
    new_platform: Callable[..., Platform], serve: Callable[[ASGIApp], str]
) -> None:
    from dataclasses import replace

    from resources.database.engine import make_logins

    away = replace(new_platform(), logins=make_logins("postgresql://nobody@127.0.0.1:9/none"))
    url = serve(create_app(away))
    for path in ("/healthz", "/readyz", "/v1/models"):
        answer = httpx.get(url + path, headers={"authorization": "Bearer ft-sk-any"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "database_unavailable"), path
        assert answer.headers["retry-after"] == "1"
        assert "127.0.0.1" not in json.dumps(answer.json())


def test_a_healthy_server_says_so_and_an_unmigrated_one_is_not_ready(api_url: str, tenant: Tenant) -> None:
    assert httpx.get(f"{api_url}/livez").json() == {"status": "ok"}
    assert httpx.get(f"{api_url}/healthz").json() == {"status": "ok"}
    assert httpx.get(f"{api_url}/readyz").json()["status"] == "ready"
