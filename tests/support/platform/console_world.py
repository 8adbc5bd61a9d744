"""A tenant with something on every page of the console: datasets, a refused file, jobs in several states, models, usage."""

from __future__ import annotations

import json
import math
import uuid
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from control_plane.adapters import promotions
from control_plane.adapters import service as adapters
from control_plane.attempts import service as attempts
from control_plane.datasets.tables import files
from control_plane.datasets.uploads import uploaded_files
from control_plane.evaluations import reports
from control_plane.jobs import service as jobs
from control_plane.jobs.queue_entry import mark_packed
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.jobs.transitions import record_many, transition
from control_plane.platform.context import Platform
from control_plane.platform.job_events import metrics_event
from control_plane.platform.job_states import JobState
from control_plane.queue import cycle
from control_plane.tenants import members
from control_plane.tenants import service as tenants
from core.base_models import Catalogue
from tests.support.console.console_account import ROUTE, furnish, last_month
from tests.support.jobs.evaluation_results import store_evaluation
from tests.support.jobs.training_specs import SPEC
from tests.support.models.tiny_adapter import build_tiny_adapter
from tests.support.models.tiny_model import build_tiny_model
from tests.support.platform.fleet_in_memory import Servers

STEPS = 60
REPEATED = " and ".join(f"delivery {i}" for i in range(30))
"""Long enough that two rows which differ in one word are near duplicates."""


@dataclass(frozen=True, kw_only=True)
class World:
    platform: Platform
    tenant: str
    key: str
    owner: str
    """Its first member."""
    dataset: str
    refused_file: str
    validating_file: str
    """A file whose rows are being read; it stays so."""
    running: str
    waiting: str
    failed: str
    evaluated: str
    """A job with a stored evaluation."""
    production: str
    """Adapter that is served; `draft` can be promoted, `pending` waits for approval."""
    draft: str
    pending: str
    key_id: str
    route: str = ROUTE
    month: str
    """The month whose invoice is issued."""


def make_world(platform: Platform, directory: Path, *, tenant: str = "acme", text: str = "") -> World:
    """`text` is added to everything that a tenant names."""
    base = build_tiny_model(directory / "tiny-base")
    entry = {"id": "tiny-base", "path": str(base), "license": "Apache-2.0"}
    platform = replace(platform, models=Catalogue({"tiny-base": (entry, base)}))
    if isinstance(platform.fleet, Servers):
        for server in platform.fleet.at.values():
            server.digest = platform.models.get("tiny-base").digest
    _, key = tenants.create(platform, tenant, name=f"Acme Support{text}", tier="standard", owner_email="ada@example.com")
    dataset, file = _dataset(platform, tenant, directory, text)
    refused = _refused(platform, tenant, directory, text)
    validating = _validating(platform, tenant, text)
    running = _running(platform, tenant, file, text)
    waiting = _job(platform, tenant, file, seed=2)
    mark_packed(platform, tenant, waiting, spec=SPEC, total_steps=400, expected_s=1800.0)
    cycle.run_cycle(platform)
    failed = _job(platform, tenant, file, seed=3)
    error = {"code": "out_of_memory", "message": f"the step needs 91 GiB and the GPU has 80{text}; lower batch_size", "param": None}
    with platform.engine.begin() as conn:
        transition(conn, failed, JobState.FAILED, message=f"Training failed: out of memory.{text}", error=error)
    scores = ((0.71, False), (0.83, False), (0.64, True))
    models = [_model(platform, tenant, (dataset, file), base, directory, score, approval) for score, approval in scores]
    promotions.promote(platform, tenant, models[0])
    evaluated = adapters.get_adapter(platform, tenant, models[1]).job_id
    furnish(platform, tenant, job=evaluated, adapter=models[0], text=text)
    owner = members.list_members(platform, tenant).items[0].id
    return World(
        platform=platform, tenant=tenant, key=key.secret, owner=owner, dataset=dataset, refused_file=refused,
        validating_file=validating, running=running,
        waiting=waiting, failed=failed, evaluated=evaluated, production=models[0], draft=models[1], pending=models[2],
        key_id=key.id, month=last_month(platform),
    )  # fmt: skip


def _dataset(platform: Platform, tenant: str, directory: Path, text: str) -> tuple[str, str]:
    path = directory / "support.jsonl"
    turns = [(f"How do I reset password {i}?{text}", f"Open Settings, then Security. Case {i}.{text}") for i in range(160)]
    turns.append(("Whom do I ask?", f"Mail ada@example.com.{text}"))
    turns += [(f"Explain {REPEATED}", f"It {verb} sent within {REPEATED} days.{text}") for verb in ("is", "was")]
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


def _validating(platform: Platform, tenant: str, text: str) -> str:
    now = platform.clock()
    progress = {"stage": "reading", "rows": 12_000, "bytes": 400, "total_bytes": 1000, "at": now.timestamp(), "token": "t"}
    row = {
        "id": f"file-{uuid.uuid4().hex[:24]}", "tenant_id": tenant, "filename": f"long{text}.jsonl", "purpose": "fine-tune", "bytes": 1000,
        "sha256": "0" * 64, "object_key": "files/long", "status": "uploaded", "progress": progress, "created_at": now,
    }  # fmt: skip
    with platform.engine.begin() as conn:
        conn.execute(sa.insert(files).values(**row))
    return str(row["id"])


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


def _model(platform: Platform, tenant: str, data: tuple[str, str], base: Path, directory: Path, score: float, approval: bool) -> str:
    """An adapter with real files, registered as that of a job; returns its id."""
    job, now = f"ftjob-{uuid.uuid4().hex[:24]}", platform.clock()
    spec = {"lock_sha256": "a" * 64, "commit": "c" * 40, "strategy": "single"}
    row = {
        "id": job, "tenant_id": tenant, "state": "succeeded", "tier": "standard", "model": "tiny-base", "method": "sft", "seed": 7,
        "base_digest": platform.models.get("tiny-base").digest, "training_file": data[1], "suffix": "support",
        "request": {"eval_config": {"approval": "required"}} if approval else {}, "request_sha256": "r", "hyperparameters": {"n_epochs": 3},
        "dataset_id": data[0], "pack_fingerprint": "p", "spec": spec, "spec_sha256": "5" * 64, "created_at": now, "queued_at": now,
        "started_at": now - timedelta(minutes=40), "finished_at": now, "step": 200, "total_steps": 200,
    }  # fmt: skip
    with platform.engine.begin() as conn:
        conn.execute(sa.insert(jobs_table).values(**row))
    report_steps(platform, job, 1, 200)
    store_evaluation(platform, tenant, job, quarantined=False)
    found = reports.load_evaluated(platform, tenant, job)
    scored = [replace(s, adapter=score, base=0.52) if s.metric == "exact_match" else s for s in found.report.scores]
    files = build_tiny_adapter(directory / job, base, base_name="tiny-base", seed=int(100 * score))
    made, refused = adapters.register(
        platform, tenant=tenant, job_id=job, directory=files, report=replace(found.report, scores=tuple(scored)), verdict=found.verdict,
        eval_report_key=reports.report_key(tenant, job),
    )  # fmt: skip
    assert not refused, refused
    with platform.engine.begin() as conn:
        done = {"adapter_id": made.id, "fine_tuned_model": made.name}
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == job).values(**done))
    return made.id
