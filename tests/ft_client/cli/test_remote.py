"""``ft`` against the real API: the life of a job as its user sees it, in words and as JSON."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from control_plane.api.app import create_app
from control_plane.jobs import service as jobs
from control_plane.jobs.job_logs import store_piece
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.jobs.transitions import transition
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from core.layout import attempt_prefix
from ft_client.cli.job_commands import cost_so_far, log_lines
from ft_client.cli.job_progress import job_state
from tests.support.jobs.registered_adapter import add_adapter

MODEL = "tiny-base"

Ft = Callable[..., Any]
"""Runs ``ft`` with these arguments; see the fixtures."""


@pytest.fixture
def job_id(ft: Ft, write_chat_rows: Callable[..., Path]) -> str:
    done = ft("submit", write_chat_rows(120), "--model", MODEL, "--suffix", "support", "--hp", "n_epochs=2", "--seed", "7")
    assert done.code == 0, done.err
    return str(done.out.strip())


def move(platform: Platform, job_id: str, *states: JobState) -> None:
    with platform.engine.begin() as conn:
        for state in states:
            transition(conn, job_id, state, message=f"It is {state} now.")


def test_login_stores_a_key_that_only_its_owner_can_read(offline: Ft, process: Ft, api_url: str, api_key: str, tmp_path: Path) -> None:
    assert offline("--url", api_url, "login", stdin="ft-sk-wrong\n").code == 1
    path = tmp_path / "config" / "ft" / "credentials.json"
    assert not path.exists(), "a key that does not work is not stored"
    done = process("--url", api_url, "login", stdin=f"{api_key}\n")
    assert done.code == 0, done.err
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert api_key not in done.out + done.err
    assert offline("jobs").code == 0
    elsewhere = offline("--url", api_url.replace("127.0.0.1", "localhost"), "jobs")
    assert elsewhere.code == 1, "a stored key is not sent to another address"
    assert "the stored one is for" in elsewhere.err


def test_an_upload_prints_its_id(ft: Ft, write_chat_rows: Callable[..., Path]) -> None:
    done = ft("upload", write_chat_rows(120))
    assert done.code == 0
    assert done.out.startswith("file-")
    assert ft("upload", write_chat_rows(120), "--json").json["status"] == "processed"


def test_a_bad_upload_is_refused_with_every_bad_row(ft: Ft, write_chat_rows: Callable[..., Path]) -> None:
    path = write_chat_rows(120)
    path.write_text(path.read_text() + '{"messages": 3}\n')
    done = ft("submit", path, "--model", MODEL)
    assert done.code == 1
    assert "row 121" in done.err
    assert "[invalid_training_file]" in done.err
    assert done.out == ""


def test_a_submission_arrives_as_written(ft: Ft, job_id: str) -> None:
    found = ft("job", job_id, "--json").json
    assert (found["model"], found["suffix"], found["seed"], found["auto_promote"]) == (MODEL, "support", 7, True)
    assert found["hyperparameters"]["n_epochs"] == 2
    listed = ft("jobs", "--json").json
    assert [j["id"] for j in listed] == [job_id]
    assert job_id in ft("jobs").out
    assert f"job: {job_id}" in " ".join(ft("job", job_id).out.split())


def test_an_uploaded_file_can_be_submitted_by_its_id_without_promotion(ft: Ft, write_chat_rows: Callable[..., Path]) -> None:
    file_id = ft("upload", write_chat_rows(120), "--json").json["id"]
    made = ft("submit", file_id, "--model", MODEL, "--validation-file", file_id, "--no-promote", "--seed", "0", "--json").json
    assert (made["training_file"], made["validation_file"], made["auto_promote"], made["seed"]) == (file_id, file_id, False, 0)


def test_the_gate_of_a_job_is_chosen_as_it_is_submitted(ft: Ft, write_chat_rows: Callable[..., Path]) -> None:
    file_id = ft("upload", write_chat_rows(120), "--json").json["id"]
    chosen = {"monitor": {"mode": "monitor"}, "off": {"mode": "off"}, "enforce": None}
    for gate, config in chosen.items():
        made = ft("submit", file_id, "--model", MODEL, "--gate", gate, "--force", "--json").json
        assert made["eval_config"] == config
    made = ft("submit", file_id, "--model", MODEL, "--skip", "task", "--skip", "golden", "--force", "--json").json
    assert made["eval_config"] == {"skip": ["task", "golden"]}
    refused = ft("submit", file_id, "--model", MODEL, "--skip", "tasks")
    assert refused.code == 1 and "tasks" in refused.err


def test_experiment_is_submitted_unpromoted_and_has_no_gate_of_its_own(ft: Ft, write_chat_rows: Callable[..., Path]) -> None:
    file_id = ft("upload", write_chat_rows(120), "--json").json["id"]
    made = ft("submit", file_id, "--model", MODEL, "--experiment", "--skip", "task", "--force", "--json").json
    assert (made["eval_config"], made["auto_promote"]) == ({"mode": "experiment", "skip": ["task"]}, False)
    assert ft("submit", file_id, "--model", MODEL, "--experiment", "--promote", "--force", "--json").json["auto_promote"] is True
    refused = ft("submit", file_id, "--model", MODEL, "--experiment", "--gate", "off")
    assert refused.code == 2 and "exclude each other" in refused.err


def test_state_of_an_experiment_says_that_its_model_is_not_approved() -> None:
    ended = {"state": "succeeded", "adapter_id": "adp-1", "fine_tuned_model": None}
    assert job_state(ended) == "succeeded, not approved"
    assert job_state({**ended, "fine_tuned_model": "ft:m"}) == job_state({"status": "succeeded"}) == "succeeded"


def test_tier_and_spot_are_chosen_by_options(ft: Ft, write_chat_rows: Callable[..., Path]) -> None:
    file_id = ft("upload", write_chat_rows(120), "--json").json["id"]
    made = ft("submit", file_id, "--model", MODEL, "--tier", "free", "--spot", "--json").json
    assert (made["tier"], made["spot"]) == ("free", True)
    assert ft("submit", file_id, "--model", MODEL, "--json").json["spot"] is False, "spot is chosen"
    refused = ft("submit", file_id, "--model", MODEL, "--tier", "gold")
    assert refused.code == 1 and "gold" in refused.err


def test_running_attempt_is_in_the_cost_that_a_job_shows() -> None:
    assert cost_so_far({"cost_micros": 1_500_000, "unbilled_micros": 500_000}) == "1.5000 USD, of which 0.5000 by the running attempt"
    assert cost_so_far({"cost_micros": 1_500_000, "unbilled_micros": 0}) == "1.5000 USD"
    assert cost_so_far({"cost_micros": 0, "unbilled_micros": 0}) is None


def test_several_files_are_submitted_as_a_mixture(ft: Ft, write_chat_rows: Callable[..., Path]) -> None:
    first, second = write_chat_rows(120), write_chat_rows(60, name="more.jsonl", salt=" Tell me.")
    made = ft("submit", f"{first},weight=2", f"{second},weight=0.5", "--model", MODEL, "--json").json
    assert [(one["weight"], one["tokens"]) for one in made["training_files"]] == [(2, None), (0.5, None)]
    assert made["training_file"] == made["training_files"][0]["file"] != made["training_files"][1]["file"]
    ids = [one["file"] for one in made["training_files"]]
    refused = ft("submit", f"{ids[0]},weight=0", ids[1], "--model", MODEL)
    assert refused.code == 1
    assert "weight 0.0 of" in refused.err and "[invalid_training_files" in refused.err


def test_a_refused_submission_leaves_its_file_for_the_next_one(ft: Ft, write_chat_rows: Callable[..., Path]) -> None:
    rows = write_chat_rows(120)
    assert ft("submit", rows, "--model", "no-such-model").code == 1
    (file,) = ft("files", "list", "--json").json
    done = ft("submit", rows, "--model", MODEL, "--json")
    assert done.json["training_file"] == file["id"]
    assert f"{rows} is uploaded already: {file['id']} (support.jsonl, " in done.err
    assert [one["id"] for one in ft("files", "list", "--json").json] == [file["id"]]
    other = ft("submit", rows, "--model", MODEL, "--policy", "pii=redact", "--json").json
    assert other["training_file"] != file["id"], "a file that was checked otherwise is another one"
    counted = write_chat_rows(121)
    uploaded = ft("upload", counted, "--model", MODEL, "--json").json
    assert ft("submit", counted, "--model", MODEL, "--json").json["training_file"] != uploaded["id"], "and so is one checked with a model"


def test_jobs_are_listed_by_the_status_that_the_list_shows(ft: Ft, platform: Platform, job_id: str) -> None:
    assert [j["id"] for j in ft("jobs", "--status", "validating", "--json").json] == [job_id]
    assert [j["id"] for j in ft("jobs", "--status", "validating_files", "--json").json] == [job_id], "OpenAI's word"
    move(platform, job_id, JobState.QUEUED)
    assert ft("jobs", "--status", "validating", "--json").json == []
    refused = ft("jobs", "--status", "waiting")
    assert refused.code == 1
    assert "'waiting' does not exist; use one of" in refused.err


def test_a_job_is_paused_resumed_and_cancelled(ft: Ft, platform: Platform, job_id: str) -> None:
    move(platform, job_id, JobState.QUEUED)
    assert "paused" in ft("pause", job_id).err
    assert ft("resume", job_id, "--json").json["state"] == "queued"
    assert ft("cancel", job_id, "--json").json["status"] == "cancelled"
    refused = ft("resume", job_id)
    assert refused.code == 1
    assert "[invalid_state" in refused.err


def test_another_tenants_job_does_not_exist(ft: Ft, platform: Platform, job_id: str) -> None:
    _, key = tenants.create(platform, f"t-{uuid.uuid4().hex[:8]}")
    done = ft("--api-key", key.secret, "job", job_id)
    assert done.code == 1
    assert "[fine_tune_not_found, job_id]" in done.err


def test_events_are_printed_oldest_first(ft: Ft, platform: Platform, job_id: str) -> None:
    move(platform, job_id, JobState.QUEUED, JobState.PROVISIONING, JobState.RUNNING)
    lines = ft("logs", job_id).out.splitlines()
    assert lines[-1].endswith("info  It is running now.")
    assert "Created fine-tuning job" in lines[0]
    events = [json.loads(line) for line in ft("logs", job_id, "--json").out.splitlines()]
    assert [e["code"] for e in events] == ["job_created", "job_queued", "job_provisioning", "job_running"]


def test_training_log_is_printed_as_it_is_and_as_json_line_by_line(ft: Ft, platform: Platform, tenant: Tenant, job_id: str) -> None:
    move(platform, job_id, JobState.QUEUED, JobState.PROVISIONING)
    log = "step 1\n\nstep 2 \u2028 \u00e4\nhalf"
    store_piece(platform.objects, attempt_prefix(tenant.id, job_id, 1), 0, log.encode())
    move(platform, job_id, JobState.FAILED)
    with platform.engine.begin() as conn:
        long_ago = platform.clock() - timedelta(hours=1)
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == job_id).values(attempt=1, finished_at=long_ago))
    for follow in ((), ("--follow",)):
        assert ft("logs", job_id, "--training", *follow).out == log
        lines = ft("logs", job_id, "--training", *follow, "--json").out.splitlines()
        assert [json.loads(line) for line in lines] == [{"text": text} for text in log.split("\n")]


def test_lines_that_come_in_pieces_are_whole() -> None:
    assert [*log_lines(["a\nb", "c", "\n\nd\n"])] == ["a", "bc", "", "d"]
    assert [*log_lines(["a\n", "b"])] == ["a", "b"]


def test_followed_events_are_those_of_the_job_up_to_its_end(ft: Ft, platform: Platform, job_id: str) -> None:
    def live() -> None:
        for state in (JobState.QUEUED, JobState.CANCELLED):
            time.sleep(0.5)
            move(platform, job_id, state)

    thread = threading.Thread(target=live)
    thread.start()
    followed = ft("logs", job_id, "--follow").out
    thread.join()
    assert followed == ft("logs", job_id).out
    assert len(followed.splitlines()) == 3


@pytest.mark.parametrize(("end", "code"), [(JobState.SUCCEEDED, 0), (JobState.FAILED, 1), (JobState.CANCELLED, 3)], ids=lambda v: str(v))
def test_waiting_ends_with_the_job_and_its_exit_code(ft: Ft, platform: Platform, job_id: str, end: JobState, code: int) -> None:
    def live() -> None:
        for state in (JobState.QUEUED, JobState.PROVISIONING, JobState.RUNNING, JobState.EVALUATING, end):
            time.sleep(0.3)
            move(platform, job_id, state)

    thread = threading.Thread(target=live)
    thread.start()
    done = ft("job", job_id, "--wait", "--json")
    thread.join()
    assert done.code == code
    assert done.json["status"] == end.value
    assert "It is running now." in done.err
    assert f"It is {end} now." in done.err


def test_ctrl_c_while_waiting_leaves_the_job_running_and_says_how_to_come_back(
    ft_env: dict[str, str], platform: Platform, tenant: Tenant, api_url: str, api_key: str, job_id: str
) -> None:
    env = {**ft_env, "FT_API_URL": api_url, "FT_API_KEY": api_key}
    command = [sys.executable, "-m", "ft_client", "job", job_id, "--wait"]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as p:
        assert p.stderr is not None
        first = p.stderr.readline()
        assert "Created fine-tuning job" in first
        os.kill(p.pid, signal.SIGINT)
        rest = p.stderr.read()
        assert p.wait(20) == 130
    assert f"ft job {job_id} --wait" in rest
    assert jobs.get(platform, tenant.id, job_id).job.state == "validating"


async def _complete(request: Request) -> Response:
    body = await request.json()
    words = [" "] if body["messages"][-1]["content"] == "Silence" else ["Hello", " from ", body["model"]]
    if not body.get("stream"):
        return JSONResponse({"choices": [{"index": 0, "message": {"role": "assistant", "content": "".join(words)}}]})

    def chunks() -> Iterator[str]:
        for word in words:
            yield f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': word}}]})}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(chunks(), media_type="text/event-stream")


def test_an_answer_streams_from_the_inference_server(
    offline: Ft, new_platform: Callable[..., Platform], serve: Callable[[ASGIApp], str]
) -> None:
    engine = serve(Starlette(routes=[Route("/v1/chat/completions", _complete, methods=["POST"])]))
    platform = new_platform(inference_urls=engine)
    _, key = tenants.create(platform, "chatty")
    env = {"FT_API_URL": serve(create_app(platform)), "FT_API_KEY": key.secret}
    assert offline("chat", MODEL, "Hi", **env).out == f"Hello from {MODEL}\n"
    assert offline("chat", MODEL, "-", stdin="Hi", **env).out == f"Hello from {MODEL}\n"
    assert offline("chat", MODEL, "Hi", "--json", **env).json["choices"][0]["message"]["content"] == f"Hello from {MODEL}"
    silent = offline("chat", MODEL, "Silence", **env)
    assert (silent.out.strip(), silent.err.strip()) == ("", "(empty answer)"), "what a script reads is what the model wrote"
    refused = offline("chat", "nobody", "Hi", **env)
    assert refused.code == 1
    assert "[model_not_found" in refused.err


def test_models_and_adapters_are_listed(ft: Ft) -> None:
    assert MODEL in ft("models").out
    assert MODEL in [m["id"] for m in ft("models", "--json").json]
    assert ft("adapters", "--json").json == []
    assert ft("promote", "adp-none").code == 1


def test_adapters_are_shown_with_what_serves_them_and_their_scores(ft: Ft, platform: Platform, tenant: Tenant) -> None:
    scores = {"holdout/exact_match": 0.9, "base/holdout/exact_match": 0.125}
    name = f"ft:{MODEL}:{tenant.id}:bot:abc123"
    adapter_id = add_adapter(platform, tenant.id, name=name, stage="production", loaded=True, metrics=scores)
    (line,) = [row for row in ft("adapters", COLUMNS="240").out.splitlines() if adapter_id in row]
    for shown in (name, "production", "loaded", "90.0 % (12.5 %)"):
        assert shown in line
    assert ft("adapters", "--json").json[0]["observed"] == "loaded"


@pytest.mark.parametrize(
    ("scores", "shown"),
    [
        ({"validation/preference_accuracy": 0.75, "holdout/exact_match": 0.1}, "preference accuracy 75.0 % (50.0 %)"),
        ({"holdout/exact_match": 0.0, "validation/perplexity": 1.5}, "perplexity 1.50 (3.00)"),
    ],
)
def test_an_adapter_is_shown_with_what_its_method_is_judged_by(
    ft: Ft, platform: Platform, tenant: Tenant, scores: dict[str, float], shown: str
) -> None:
    base = {"base/validation/preference_accuracy": 0.5, "base/holdout/exact_match": 0.0, "base/validation/perplexity": 3.0}
    name = f"ft:{MODEL}:{tenant.id}:judged:{len(scores)}{shown[:4]}"
    adapter_id = add_adapter(platform, tenant.id, name=name, stage="draft", loaded=False, metrics=base | scores)
    (line,) = [row for row in ft("adapters", COLUMNS="240").out.splitlines() if adapter_id in row]
    assert shown in line


def test_a_waiting_job_says_where_it_stands_and_why(ft: Ft, platform: Platform, job_id: str) -> None:
    move(platform, job_id, JobState.QUEUED)
    words = {"reason": "WaitingForQuota", "reason_detail": "2 of 2 GPUs are in use", "queue_position": 3}
    words |= {"ahead": {"jobs": {"premium": 2}, "num_gpus": 3}, "expected_start_at": platform.clock() + timedelta(minutes=12, seconds=20)}
    line = "Position 3 · waits for its GPUs · starts about"
    with platform.engine.begin() as conn:
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == job_id).values(**words))
    shown = " ".join(ft("job", job_id).out.split())
    assert "waits because: WaitingForQuota: 2 of 2 GPUs are in use" in shown
    assert f"queue: {line}" in shown
    assert "(in 12 min) · ahead: 2 premium jobs for 3 GPUs" in shown
    assert line in ft("jobs", COLUMNS="240").out

    def end() -> None:
        time.sleep(4.0)
        move(platform, job_id, JobState.CANCELLED)

    thread = threading.Thread(target=end)
    thread.start()
    done = ft("job", job_id, "--wait", "--json")
    thread.join()
    assert done.err.count(f"queued: {line}") == 1


def test_an_operator_makes_a_tenant_whose_key_works(offline: Ft, platform: Platform, api_url: str) -> None:
    name = f"t-{uuid.uuid4().hex[:8]}"
    url = platform.settings.database_url
    done = offline("admin", "tenants", "create", name, "--tier", "premium", FT_DATABASE_URL=url)
    assert done.code == 0, done.err
    key = done.out.strip()
    assert offline("jobs", "--json", FT_API_URL=api_url, FT_API_KEY=key).json == []
    again = offline("admin", "tenants", "create", name, FT_DATABASE_URL=url)
    assert again.code == 1
    assert "[tenant_exists" in again.err
    listed = offline("admin", "tenants", "list", "--json", FT_DATABASE_URL=url).json
    (made,) = [t for t in listed if t["id"] == name]
    assert (made["name"], made["tier"], made["max_jobs_in_flight"]) == (name, "premium", 20)
    assert offline("admin", "tenants", "list", FT_DATABASE_URL="postgresql://nobody@127.0.0.1:9/none").code == 4
