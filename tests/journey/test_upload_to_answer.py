"""From a tenant's file to an answer from its adapter, with the real `openai` client and the real processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
from dagster_graphql import DagsterGraphQLClient

from tests.journey.conftest import ROOT, Stack

TenantMaker = Callable[[], tuple[str, str]]
QUICK = {"method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 1}}}, "seed": 7}
EXTRA = {"eval_config": {"skip": ["golden", "task", "perplexity"], "max_items": 8, "max_new_tokens": 40}}
"""A few steps on a few rows teach nothing that a gate would accept; what is tested is the way, not the score."""

pytestmark = pytest.mark.timeout(600)


def wait_for(client: openai.OpenAI, job_id: str, *, seconds: float = 420) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        job = client.fine_tuning.jobs.retrieve(job_id)
        if job.status in ("succeeded", "failed", "cancelled"):
            return job
        time.sleep(1)
    pytest.fail(f"job {job_id} is still {job.status}")


@pytest.fixture(scope="module")
def finished(stack: Stack, tickets: Path) -> dict[str, Any]:
    """A job that went the whole way, with its tenant's client."""
    key = json.loads(stack.ft("admin", "tenants", "create", "journey", "--tier", "standard", "--json").stdout)["api_key"]
    client = stack.client(key)
    file = client.files.create(file=tickets, purpose="fine-tune")
    assert file.status == "processed", file.status_details
    job = client.fine_tuning.jobs.create(model="demo-llama-3m", training_file=file.id, suffix="tickets", extra_body=EXTRA, **QUICK)
    return {"client": client, "key": key, "tenant": "journey", "file": file, "job": wait_for(client, job.id)}


def test_the_job_succeeds_and_its_adapter_answers(finished: dict[str, Any]) -> None:
    job, client = finished["job"], finished["client"]
    assert job.status == "succeeded", job.error
    assert job.fine_tuned_model.startswith("ft:demo-llama-3m:journey:tickets:")
    assert job.trained_tokens > 0
    ask = {"messages": [{"role": "user", "content": "My router arrived broken."}], "max_tokens": 24, "temperature": 0}
    answer = client.chat.completions.create(model=job.fine_tuned_model, **ask)
    base = client.chat.completions.create(model="demo-llama-3m", **ask)
    assert answer.model == job.fine_tuned_model
    assert answer.choices[0].message.content
    assert answer.choices[0].message.content != base.choices[0].message.content


def test_the_doctor_finds_nothing_wrong(stack: Stack) -> None:
    found = json.loads(stack.ft("admin", "doctor", "--json").stdout)["findings"]
    assert {each["check"] for each in found} >= {"database", "object store", "API", "Dagster", "serving", "Kueue"}
    assert {each["status"] for each in found} == {"ok", "skipped"}, found


def test_its_events_are_in_order_and_tell_the_whole_way(finished: dict[str, Any]) -> None:
    events = list(reversed(list(finished["client"].fine_tuning.jobs.list_events(finished["job"].id, limit=100))))
    codes = [e.code for e in events]
    way = [f"job_{state}" for state in ("created", "queued", "provisioning", "running", "evaluating", "succeeded")]
    assert [c for c in codes if c in way] == way
    assert [e.created_at for e in events] == sorted(e.created_at for e in events)
    steps = [e.data["step"] for e in events if e.type == "metrics" and "train_loss" in e.data]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 3


def test_its_checkpoints_are_listed(finished: dict[str, Any]) -> None:
    checkpoints = list(finished["client"].fine_tuning.jobs.checkpoints.list(finished["job"].id))
    assert checkpoints
    assert checkpoints[0].step_number == finished["job"].step


def test_its_adapter_has_complete_lineage(finished: dict[str, Any], stack: Stack) -> None:
    url = f"{stack.endpoints['api']}/v1/adapters/{finished['job'].adapter_id}"
    record = requests.get(url, headers={"Authorization": f"Bearer {finished['key']}"}, timeout=60).json()
    lineage = (
        "base_model",
        "base_digest",
        "job_id",
        "dataset_id",
        "pack_fingerprint",
        "spec_sha256",
        "lock_sha256",
        "commit",
        "manifest_sha256",
    )
    assert [name for name in lineage if not record.get(name)] == []
    assert record["stage"] == "production"


def test_another_tenant_sees_nothing_of_it(finished: dict[str, Any], stack: Stack, new_tenant: TenantMaker) -> None:
    other = stack.client(new_tenant()[1])
    with pytest.raises(openai.NotFoundError):
        other.fine_tuning.jobs.retrieve(finished["job"].id)
    with pytest.raises(openai.NotFoundError):
        other.files.retrieve(finished["file"].id)
    with pytest.raises(openai.NotFoundError):
        other.chat.completions.create(model=finished["job"].fine_tuned_model, messages=[{"role": "user", "content": "hi"}])
    assert finished["job"].fine_tuned_model not in [m.id for m in other.models.list()]


def dagster_of(stack: Stack) -> DagsterGraphQLClient:
    token = (stack.home / "dagster.token").read_text().strip()
    host, port = stack.endpoints["dagster"].removeprefix("http://").split(":")
    return DagsterGraphQLClient(host, port_number=int(port), headers={"Authorization": f"Bearer {token}"})


def launch(stack: Stack, job_name: str, **kwargs: Any) -> tuple[str, str]:
    """Launch through Dagster's GraphQL; returns the run's id and how it ended."""
    client = dagster_of(stack)
    run_id = client.submit_job_execution(job_name, **kwargs)
    return run_id, ended(client, run_id)


def ended(client: DagsterGraphQLClient, run_id: str) -> str:
    for _ in range(120):
        status: str = client.get_run_status(run_id).value
        if status in ("SUCCESS", "FAILURE", "CANCELED"):
            return status
        time.sleep(0.5)
    pytest.fail(f"run {run_id} is still {status}")


def test_training_launched_around_the_queue_is_refused(finished: dict[str, Any], stack: Stack) -> None:
    partition = f"{finished['tenant']}:{finished['job'].id}"
    _, status = launch(stack, "train", tags={"dagster/partition": partition, "ft/reservation": "granted"})
    assert status == "CANCELED"
    assert finished["client"].fine_tuning.jobs.retrieve(finished["job"].id).status == "succeeded"


@pytest.mark.slow
def test_the_documented_script_submits_a_job(finished: dict[str, Any], stack: Stack) -> None:
    (script,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "dagster.md").read_text(), re.MULTILINE | re.DOTALL)
    operator = json.loads(stack.ft("admin", "operators", "create", "ci", "--json").stdout)
    env = {**os.environ, "FT_OPERATOR_KEY": operator["secret"], "FT_DAGSTER": stack.endpoints["dagster"].removeprefix("http://")}
    before = {job.id for job in finished["client"].fine_tuning.jobs.list()}
    words = [sys.executable, "-c", script, finished["tenant"], "demo-llama-3m", finished["file"].id]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert ended(dagster_of(stack), done.stdout.strip()) == "SUCCESS"
    (made,) = [job for job in finished["client"].fine_tuning.jobs.list() if job.id not in before]
    assert finished["client"].fine_tuning.jobs.cancel(made.id).status == "cancelled"


def test_a_submission_through_graphql_takes_the_same_way_in(finished: dict[str, Any], stack: Stack) -> None:
    config = {"tenant": finished["tenant"], "model": "demo-llama-3m", "training_file": finished["file"].id, "suffix": "graphql"}
    _, status = launch(stack, "submit", run_config={"ops": {"register": {"config": config}}})
    assert status == "SUCCESS"
    newest = next(iter(finished["client"].fine_tuning.jobs.list(limit=1)))
    assert newest.suffix == "graphql"
    assert newest.status in ("validating_files", "queued", "running")
    assert finished["client"].fine_tuning.jobs.cancel(newest.id).status == "cancelled"


def test_a_refused_submission_through_graphql_fails_its_run(finished: dict[str, Any], stack: Stack) -> None:
    config = {"tenant": finished["tenant"], "model": "no-such-model", "training_file": finished["file"].id}
    _, status = launch(stack, "submit", run_config={"ops": {"register": {"config": config}}})
    assert status == "FAILURE"


@pytest.mark.slow
def test_ci_runs_an_evaluation_again(finished: dict[str, Any], stack: Stack) -> None:
    partition = f"{finished['tenant']}:{finished['job'].id}"
    dagster = Path(sys.executable).parent / "dagster"
    command = [str(dagster), "asset", "materialize", "-m", "ft_assets.definitions", "--select", "eval_report", "--partition", partition]
    done = subprocess.run(command, env=stack.dagster_env(), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "RUN_SUCCESS" in done.stdout + done.stderr


@pytest.mark.slow
def test_ci_cannot_train_without_a_reservation(finished: dict[str, Any], stack: Stack) -> None:
    partition = f"{finished['tenant']}:{finished['job'].id}"
    dagster = Path(sys.executable).parent / "dagster"
    command = [str(dagster), "asset", "materialize", "-m", "ft_assets.definitions", "--select", "checkpoint", "--partition", partition]
    done = subprocess.run(command, env=stack.dagster_env(), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "holds no reservation" in done.stdout + done.stderr


ROWS = b"".join(b'{"messages":[{"role":"user","content":"%d"},{"role":"assistant","content":"b"}]}\n' % i for i in range(3))


@pytest.mark.parametrize(
    ("name", "content", "status", "said"),
    [
        pytest.param("photo.jsonl", b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 20, "error", "PNG", id="a picture"),
        pytest.param("tiny.jsonl", ROWS, "processed", "at least 10:", id="three rows, enough to validate on but not to train on"),
    ],
)
def test_a_file_that_cannot_be_trained_on_is_refused_with_the_reason(
    stack: Stack, new_tenant: TenantMaker, name: str, content: bytes, status: str, said: str
) -> None:
    client = stack.client(new_tenant()[1])
    file = client.files.create(file=(name, content), purpose="fine-tune")
    assert file.status == status
    with pytest.raises(openai.BadRequestError) as refused:
        client.fine_tuning.jobs.create(model="demo-llama-3m", training_file=file.id)
    assert refused.value.code == "invalid_training_file"
    assert refused.value.param == "training_file"
    assert said in str(refused.value)


def test_a_wrong_key_and_an_unknown_model_are_told_apart(stack: Stack, finished: dict[str, Any]) -> None:
    with pytest.raises(openai.AuthenticationError) as unknown:
        stack.client("ft-sk-nobody").models.list()
    assert unknown.value.code == "invalid_api_key"
    with pytest.raises(openai.NotFoundError) as missing:
        finished["client"].fine_tuning.jobs.create(model="gpt-9", training_file=finished["file"].id)
    assert missing.value.code == "model_not_found"
    assert "demo-llama-3m" in str(missing.value)
