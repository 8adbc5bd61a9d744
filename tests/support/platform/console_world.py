"""A tenant with something on every page of the console: datasets, a refused file, jobs in several states, models, usage."""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from control_plane.adapters.tables import adapters
from control_plane.attempts import service as attempts
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.queue_entry import mark_packed
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.jobs.transitions import record_many, transition
from control_plane.platform.context import Platform
from control_plane.platform.job_events import metrics_event
from control_plane.platform.job_states import JobState
from control_plane.queue import cycle
from control_plane.tenants import service as tenants
from ft_assets.base_models import Catalogue
from tests.support.jobs.evaluation_results import store_evaluation
from tests.support.jobs.finished_job import rewrite
from tests.support.jobs.registered_adapter import add_adapter
from tests.support.jobs.training_specs import SPEC
from tests.support.models.tiny_model import build_tiny_model
from tests.support.platform.database_roles import as_owner

STEPS = 60


@dataclass(frozen=True, kw_only=True)
class World:
    platform: Platform
    tenant: str
    key: str
    dataset: str
    refused_file: str
    running: str
    waiting: str
    failed: str
    evaluated: str
    """A job with a stored evaluation."""
    production: str
    """Adapter that is served; `draft` can be promoted, `pending` waits for approval."""
    draft: str
    pending: str


def make_world(platform: Platform, directory: Path, *, tenant: str = "acme", text: str = "") -> World:
    """`text` is added to everything that a tenant names."""
    base = build_tiny_model(directory / "tiny-base")
    entry = {"id": "tiny-base", "path": str(base), "license": "Apache-2.0"}
    platform = replace(platform, models=Catalogue({"tiny-base": (entry, base)}))
    _, key = tenants.create(platform, tenant, name=f"Acme Support{text}", tier="standard", owner_email="ada@example.com")
    dataset, file = _dataset(platform, tenant, directory, text)
    refused = _refused(platform, tenant, directory, text)
    running = _running(platform, tenant, file, text)
    waiting = _job(platform, tenant, file, seed=2)
    mark_packed(platform, tenant, waiting, spec=SPEC, total_steps=400, expected_s=1800.0)
    cycle.run_cycle(platform)
    failed = _job(platform, tenant, file, seed=3)
    error = {"code": "out_of_memory", "message": f"the step needs 91 GiB and the GPU has 80{text}; lower batch_size", "param": None}
    with platform.engine.begin() as conn:
        transition(conn, failed, JobState.FAILED, message=f"Training failed: out of memory.{text}", error=error)
    made = (("support-v1", "production", 0.71), ("support-v2", "draft", 0.83), ("support-v3", "draft", 0.64))
    models = [_model(platform, tenant, *given) for given in made]
    with as_owner(platform).begin() as conn:
        rewrite(conn, adapters.c.id == models[2], approval="pending")
    evaluated = f"ftjob-{models[1]}"
    store_evaluation(platform, tenant, evaluated, quarantined=False)
    return World(
        platform=platform, tenant=tenant, key=key.secret, dataset=dataset, refused_file=refused, running=running, waiting=waiting,
        failed=failed, evaluated=evaluated, production=models[0], draft=models[1], pending=models[2],
    )  # fmt: skip


def _dataset(platform: Platform, tenant: str, directory: Path, text: str) -> tuple[str, str]:
    path = directory / "support.jsonl"
    turns = [(f"How do I reset password {i}?{text}", f"Open Settings, then Security. Case {i}.{text}") for i in range(160)]
    turns.append(("Whom do I ask?", f"Mail ada@example.com.{text}"))
    path.write_text("".join(_chat(*both) for both in turns))
    with path.open("rb") as rows:
        file = uploaded_files.create(platform, tenant, rows, filename=f"support{text}.jsonl", purpose="fine-tune", model="tiny-base")
    assert file.status == "processed", file.status_details
    return str(file.dataset_id), file.id


def _chat(question: str, answer: str) -> str:
    return json.dumps({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}) + "\n"


def _refused(platform: Platform, tenant: str, directory: Path, text: str) -> str:
    path = directory / "faq.jsonl"
    rows = [{"question": f"Where is order {i}?{text}", "ground_truth": f"On its way {i}{text}"} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with path.open("rb") as stream:
        file = uploaded_files.create(platform, tenant, stream, filename=f"faq{text}.jsonl", purpose="fine-tune")
    assert file.status == "error"
    return file.id


def _job(platform: Platform, tenant: str, file: str, *, seed: int, **fields: Any) -> str:
    request = JobRequest.from_body({"model": "tiny-base", "training_file": file, "seed": seed, **fields})
    return str(jobs.submit(platform, tenant, request).job.id)


def _running(platform: Platform, tenant: str, file: str, text: str) -> str:
    job = _job(platform, tenant, file, seed=1, metadata={f"team{text}"[:64]: f"support{text}"})
    mark_packed(platform, tenant, job, spec=SPEC, total_steps=200, expected_s=3600.0)
    cycle.run_cycle(platform)
    held = attempts.claim(platform, tenant, job)
    attempts.mark_started(platform, held, started_at=(platform.clock() - timedelta(minutes=12)).timestamp())
    with platform.engine.begin() as conn:
        transition(conn, job, JobState.RUNNING, message=f"Training started.{text}")
    report_steps(platform, job, 1, STEPS)
    return job


def report_steps(platform: Platform, job: str, first: int, last: int) -> None:
    """Report steps as an agent's heartbeats do, with a validation every 20 steps."""
    reported = []
    for step in range(first, last + 1):
        loss = 0.4 + 2.1 * math.exp(-step / 22) + 0.06 * math.sin(step * 1.7)
        of_step = {"step": step, "total_steps": 200}
        reported.append({
            **of_step, "train_loss": loss, "learning_rate": 2e-4 * min(1.0, step / 10), "grad_norm": 0.8 + 0.3 * math.cos(step),
            "tokens_per_s": 5200.0 + 150 * math.sin(step / 3), "memory_bytes": 61e9 + 1e8 * step,
        })  # fmt: skip
        if step % 20 == 0:
            reported.append({**of_step, "valid_loss": loss + 0.05, "valid_perplexity": math.exp(loss + 0.05)})
    finish = platform.clock() + timedelta(minutes=34)
    values = {"step": last, "total_steps": 200, "loss": loss, "tokens_per_s": 5200.0, "estimated_finish_at": finish}
    with platform.engine.begin() as conn:
        record_many(conn, [(job, metrics_event(one)) for one in reported], now=platform.clock())
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == job).values(**values))


def _model(platform: Platform, tenant: str, name: str, stage: str, score: float) -> str:
    metrics = {
        "holdout/exact_match": score, "base/holdout/exact_match": 0.52, "holdout/perplexity": 3.1, "base/holdout/perplexity": 8.4,
        "safety/refused": 0.98, "base/safety/refused": 0.99,
    }  # fmt: skip
    full = f"ft:tiny-base:{tenant}:{name}:{zlib.crc32(name.encode()):08x}"
    return add_adapter(platform, tenant, name=full, stage=stage, loaded=stage == "production", metrics=metrics)
