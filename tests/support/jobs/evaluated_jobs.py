"""Jobs that were trained: waiting for their evaluation, or evaluated with a given verdict; their adapter is made instead of trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from control_plane.attempts.tables import checkpoints
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.jobs.transitions import transition
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.platform.transfer import upload
from core import layout
from engine.evals.gate.advice import Advice
from engine.evals.gate.verdict import Finding
from engine.evals.scoring.report import EvalReport
from engine.training import checkpoints as on_disk
from engine.training.checkpoints import CheckpointManifest, manifest_digest, write_manifest
from engine.training.spec import TrainingSpec
from ft_assets.datasets import step
from tests.support.models.tiny_adapter import build_tiny_adapter
from tests.support.models.tiny_model import build_tiny_model

LONGER = Advice(code="too_few_steps", message="Train for longer.")
MODEL = "acme/concluded"
FAILED = Finding(rule="task", code="task_not_better", passed=False, blocking=True, detail="0.1, needed 0.5")
REPORT = EvalReport(
    base_model=MODEL, base_digest="b", adapter_manifest_sha256="a", suite_digest="s", adapter_applied=True, max_logit_difference=1.0,
    literal=True, scores=(), golden_faults=(), samples=(), seconds=1.0,
)  # fmt: skip
Evaluate = Callable[..., str]
CHEAP = {"task_metric": "perplexity", "max_items": 8, "max_new_tokens": 8, "capability": [], "skip": ["golden", "safety"]}
"""Evaluation in which little is asked."""


def evaluating_job(
    platform: Platform,
    tenant: str,
    rows: Path,
    *,
    seed: int = 1,
    scale: float = 0.02,
    eval_config: dict[str, Any] | None = None,
    **body: Any,
) -> str:
    """A job in state ``evaluating`` with an adapter of random numbers; returns its id."""
    with rows.open("rb") as stream:
        file = uploaded_files.create(platform, tenant, stream, filename=rows.name, purpose="fine-tune")
    asked = {
        "model": "tiny-base", "training_file": file.id, "hyperparameters": {"n_epochs": 1, "rank": 8, "max_seq_len": 128},
        "eval_config": {**CHEAP, **(eval_config or {})}, "seed": seed, **body,
    }  # fmt: skip
    job_id = str(jobs.submit(platform, tenant, JobRequest.from_body(asked)).job.id)
    step.pin_dataset(platform, tenant, job_id)
    step.pack(platform, tenant, job_id)
    for state in (JobState.PROVISIONING, JobState.RUNNING, JobState.EVALUATING):
        with platform.engine.begin() as conn:
            transition(conn, job_id, state, message="")
    finish(platform, tenant, job_id, seed=seed, scale=scale)
    return job_id


def finish(platform: Platform, tenant: str, job_id: str, *, seed: int, scale: float) -> None:
    """Store an adapter as the one that the job's training has left."""
    with platform.engine.connect() as conn:
        job = conn.execute(sa.select(jobs_table).where(jobs_table.c.id == job_id)).one()
    base = platform.models.get(job.model).directory
    assert base is not None
    made = platform.settings.work_dir / "made" / job_id
    build_tiny_adapter(made, base, base_name=job.model, seed=seed, scale=scale)
    spec = TrainingSpec.from_dict(job.spec)
    on_disk.write_manifest(made, on_disk.CheckpointManifest.of(spec, required=(), step=10, attempt=1, created_at=0.0))
    prefix = f"{layout.job_prefix(tenant, job_id)}/final/a1"
    for path in sorted(made.iterdir()):
        platform.objects.put_file(f"{prefix}/{path.name}", path)
    row = {
        "id": f"ftckpt_{job_id}", "job_id": job_id, "attempt": 1, "step": 10, "object_prefix": prefix,
        "manifest_sha256": on_disk.manifest_digest(made), "metrics": {}, "final": True, "created_at": platform.clock(),
    }  # fmt: skip
    with platform.engine.begin() as conn:
        conn.execute(sa.insert(checkpoints).values(**row))
    shutil.rmtree(made)


def store_final(
    platform: Platform, tenant: str, job_id: str, scratch: Path, spec: TrainingSpec, *, whole: bool, broken: bool = False
) -> None:
    """A real adapter of the base, or a whole model (`broken`: with another architecture), committed as the job's finished one."""
    base = platform.models.get(MODEL).directory
    assert base is not None
    made = build_tiny_model(scratch, seed=7) if whole else build_tiny_adapter(scratch, base, base_name="trained-at")
    if broken:
        config = json.loads((made / "config.json").read_text())
        (made / "config.json").write_text(json.dumps({**config, "num_hidden_layers": config["num_hidden_layers"] + 1}))
    write_manifest(made, CheckpointManifest.of(spec, required=(), step=10, attempt=1, created_at=0.0))
    prefix = layout.checkpoint_prefix(tenant, job_id, 1, 10)
    upload(platform.objects, made, prefix)
    row = {"id": f"ftckpt_{job_id[6:]}", "job_id": job_id, "attempt": 1, "step": 10, "object_prefix": prefix, "metrics": {}, "final": True}
    with platform.engine.begin() as conn:
        digest = manifest_digest(made)
        conn.execute(sa.insert(checkpoints).values(**row, manifest_sha256=digest, created_at=platform.clock()))
