"""The restore drill: a home is lost while a job trains, and a backup brings everything back in another home."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psycopg2
import pytest

from core import layout
from tests.journey.conftest import Stack, environment, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

UP_S, JOB_S = 1500, 1800
PATIENT = {"FT_HUNG_AFTER_S": "300", "FT_START_TIMEOUT_S": "900", "FT_HEARTBEAT_TIMEOUT_S": "300"}
"""Other work may share the machine, and time is not what is tested."""
STEPS = 40
REQUEST: dict[str, Any] = {
    "model": "demo-llama-3m",
    "seed": 11,
    "extra_body": {
        "eval_config": {"skip": ["golden", "task", "perplexity"], "max_items": 4, "max_new_tokens": 8},
        "hyperparameters": {"n_epochs": 8, "max_steps": STEPS, "batch_size": 2, "checkpoint_every_steps": 4},
        "method": "lora",
    },
}
QUESTION: dict[str, Any] = {"messages": [{"role": "user", "content": "My router arrived broken."}], "max_tokens": 12, "temperature": 0}


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="ft-restore-"))
    made.chmod(0o711)  # as root, the database's user passes through it
    yield made
    shutil.rmtree(made, ignore_errors=True)


def until(client: openai.OpenAI, job_id: str, done: Any) -> Any:
    patient = client.with_options(max_retries=10)  # a busy machine may answer 503 meanwhile
    deadline = time.monotonic() + JOB_S
    while time.monotonic() < deadline:
        job = patient.fine_tuning.jobs.retrieve(job_id)
        if done(job):
            return job
        time.sleep(0.2)
    pytest.fail(f"job {job_id} is still {job.status} at step {job.step}")


def ended(job: Any) -> bool:
    return job.status in ("succeeded", "failed", "cancelled")


def weights(home: Path, job: Any) -> bytes:
    final = home / "objects" / layout.job_prefix("drill", job.id) / f"final/a{job.attempt}"
    return (final / "adapter_model.safetensors").read_bytes()


def resumed_from(home: Path, job: Any) -> int:
    with contextlib.closing(psycopg2.connect(dbname="ft", user="postgres", host=str(home / "postgres"))) as session:
        cursor = session.cursor()
        cursor.execute("SELECT from_step FROM attempts WHERE job_id = %s AND attempt = %s", (job.id, job.attempt))
        return int(cursor.fetchone()[0])


def test_a_job_and_an_adapter_outlive_their_home(folder: Path, tickets: Path) -> None:
    first, backup, second = folder / "first", folder / "backup", folder / "second"
    with started(first, environment(first) | PATIENT, seconds=UP_S) as stack:
        key = json.loads(stack.ft("admin", "tenants", "create", "drill", "--tier", "standard", "--json").stdout)["api_key"]
        client = stack.client(key)
        file = client.files.create(file=tickets, purpose="fine-tune")
        twin = until(client, client.fine_tuning.jobs.create(training_file=file.id, suffix="twin", **REQUEST).id, ended)
        assert twin.status == "succeeded", twin.error
        before = client.chat.completions.create(model=twin.fine_tuned_model, **QUESTION).choices[0].message.content
        twins = weights(first, twin)
        job_id = client.fine_tuning.jobs.create(training_file=file.id, suffix="moved", **REQUEST).id
        running = until(client, job_id, lambda job: list(client.with_options(max_retries=10).fine_tuning.jobs.checkpoints.list(job.id)))
        written = json.loads(stack.ft("admin", "backup", str(backup), "--json").stdout)
        assert written["absent"] == []
    shutil.rmtree(first)

    env = environment(second) | PATIENT
    damaged = folder / "damaged"
    shutil.copytree(backup, damaged)
    torn = next((damaged / "objects").rglob("adapter_model.safetensors"))
    torn.write_bytes(torn.read_bytes()[:-1] + b"?")
    lost = Stack(home=second, env=env, endpoints={})
    refused = lost.ft("admin", "restore", str(damaged), ok=False)
    assert refused.returncode == 1
    assert str(torn.relative_to(damaged)) in refused.stderr
    assert not second.exists(), "nothing was restored"
    restored = json.loads(lost.ft("admin", "restore", str(backup), "--json").stdout)
    assert (restored["sha256"], restored["running"]) == (written["sha256"], 1), "the backup was made while the job trained"

    with started(second, env, seconds=UP_S) as stack:
        client = stack.client(key)
        moved = until(client, job_id, ended)
        assert moved.status == "succeeded", moved.error
        assert moved.attempt == running.attempt + 1, "the attempt of the old home is lost, and one more finishes the job"
        assert weights(second, moved) == twins
        assert resumed_from(second, moved) >= 4, "it begins at a checkpoint, and not at the start"
        after = client.chat.completions.create(model=twin.fine_tuned_model, **QUESTION).choices[0].message.content
        assert after == before
        assert stack.ft("adapters", "lineage", twin.fine_tuned_model, "--verify", key=key).returncode == 0
        assert not first.exists(), "nothing is written to the old home"
        ledger = json.loads(stack.ft("admin", "ledger", "check", "--json").stdout)
        assert (ledger["differences"], ledger["total_micros"]) == ([], 0)
