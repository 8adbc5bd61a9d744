"""kill -9 of the trainer, three times at random steps: the job finishes by itself and its adapter is the undisturbed one's, bit for bit."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from core import layout
from tests.journey.conftest import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS, KILLS = 24, 3
REQUEST: dict[str, Any] = {
    "model": "demo-llama-3m",
    "seed": 11,
    "extra_body": {
        "eval_config": {"skip": ["golden", "task", "perplexity"], "max_items": 4, "max_new_tokens": 8},
        "hyperparameters": {"n_epochs": 8, "max_steps": STEPS, "batch_size": 2, "checkpoint_every_steps": 3},
        "method": "lora",
    },
}
"""Our names beside OpenAI's: ``method`` is one word, hyperparameters are at the top level."""


def trainer_of(job_id: str) -> psutil.Process | None:
    """The process in the job's directory that is not torchrun; it may have been waiting for the job before there was one."""
    for process in psutil.process_iter(["cmdline", "cwd"]):
        words, cwd = process.info["cmdline"] or [], process.info["cwd"] or ""
        if cwd.endswith(f"/jobs/{job_id}") and "torch.distributed.run" not in words:
            return process
    return None


def follow(client: openai.OpenAI, job_id: str, kill_at: list[int]) -> Any:
    """Wait for the job, killing its trainer once it has reported each of the steps."""
    deadline = time.monotonic() + 700
    while time.monotonic() < deadline:
        job = client.fine_tuning.jobs.retrieve(job_id)
        if job.status in ("succeeded", "failed", "cancelled"):
            return job
        if kill_at and job.state == "running" and (job.step or 0) >= kill_at[0] and (trainer := trainer_of(job_id)):
            trainer.kill()
            kill_at.pop(0)
        time.sleep(0.1)
    pytest.fail(f"job {job_id} did not end")


def adapter_bytes(home: Path, tenant: str, job_id: str, attempt: int) -> bytes:
    """The weights that the job's last attempt left in the object store."""
    return (home / "objects" / layout.job_prefix(tenant, job_id) / f"final/a{attempt}/adapter_model.safetensors").read_bytes()


def test_a_job_killed_three_times_ends_with_the_same_adapter(stack: Stack, tickets: Path) -> None:
    key = json.loads(stack.ft("admin", "tenants", "create", "killed", "--tier", "standard", "--json").stdout)["api_key"]
    client = stack.client(key)
    file = client.files.create(file=tickets, purpose="fine-tune")
    undisturbed = follow(client, client.fine_tuning.jobs.create(training_file=file.id, suffix="calm", **REQUEST).id, [])
    kill_at = sorted(random.Random(time.time_ns()).sample(range(2, STEPS - 2), KILLS))
    planned = list(kill_at)
    disturbed = follow(client, client.fine_tuning.jobs.create(training_file=file.id, suffix="killed", **REQUEST).id, kill_at)
    assert kill_at == [], f"not all of the kills at {planned} took place"
    assert (undisturbed.status, disturbed.status) == ("succeeded", "succeeded"), (undisturbed.error, disturbed.error)
    assert disturbed.spec_sha256 == undisturbed.spec_sha256
    assert disturbed.attempt >= KILLS, f"killed at {planned}, but needed only {disturbed.attempt} attempts"
    first, second = (adapter_bytes(stack.home, "killed", job.id, job.attempt) for job in (undisturbed, disturbed))
    assert first == second, f"killed at {planned}: the adapters differ"
    ledger = disturbed.cost_micros
    assert ledger <= undisturbed.cost_micros * 2, "what the platform lost is refunded"
