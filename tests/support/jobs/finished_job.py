"""Jobs that have succeeded: the spec, the final checkpoint and the registered adapter that a training leaves, as rows and objects."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.adapters.tables import adapters
from control_plane.attempts.tables import checkpoints
from control_plane.jobs.queue_entry import mark_packed
from control_plane.jobs.tables import jobs
from control_plane.jobs.transitions import transition
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from core import layout
from core.telemetry import provenance
from engine.training.spec import CheckpointPolicy, LoraSettings, Optimization, TrainingSpec

COMMIT = "c" * 40
"""Of code without changes: what FT_COMMIT says in an image."""


def spec_for(platform: Platform, job_id: str, **changes: Any) -> TrainingSpec:
    """A spec as preparation would freeze it for this job."""
    with platform.engine.connect() as conn:
        job = conn.execute(sa.select(jobs).where(jobs.c.id == job_id)).one()
    asked = job.hyperparameters
    values: dict[str, Any] = {
        "method": job.method, "method_settings": {}, "adapter": "lora", "base_model": job.model, "base_digest": job.base_digest,
        "pack_fingerprint": "pk_0", "dataset_id": job.dataset_id, "reference": None, "warm_start": None, "max_seq_len": 128,
        "optimization": Optimization(
            learning_rate=asked.get("learning_rate", 1e-3), num_epochs=asked.get("n_epochs", 1), per_device_batch_size=4,
            accumulation_steps=2,
        ),
        "lora": LoraSettings(rank=asked.get("rank", 8), alpha=asked.get("alpha", 16)), "quantization": None,
        "checkpoint": CheckpointPolicy(), "precision": "fp32", "attention": "sdpa", "gradient_checkpointing": False,
        "strategy": "single", "world_size": 1, "seed": job.seed, "recipe": "r@1", "lock_sha256": provenance.lock_sha256(),
        "commit": COMMIT, "image": provenance.image(),
    }  # fmt: skip
    return TrainingSpec(**(values | changes))


def prepare(platform: Platform, tenant: str, job_id: str, **changes: Any) -> TrainingSpec:
    """Freeze the job's spec; it is queued, or ends with the adapter of one that trained the same."""
    spec = spec_for(platform, job_id, **changes)
    mark_packed(platform, tenant, job_id, spec=spec, total_steps=10, expected_s=60.0)
    return spec


def finish(
    platform: Platform, tenant: str, job_id: str, *, eval_loss: float = 0.5, stage: str = "production",
    scores: Mapping[str, float] | None = None, failed: bool = False, **changes: Any,
) -> str:  # fmt: skip
    """Bring a job from preparation to success (in `stage` quarantined: of an experiment), or with `failed` to a gate that it does not pass;
    returns the id of its adapter, whose files lie in the object store."""
    spec = prepare(platform, tenant, job_id, **changes)
    assert spec.lora is not None
    adapter_id, now = f"adp-{uuid.uuid4().hex[:24]}", platform.clock()
    name = f"ft:{spec.base_model}:{tenant}::{adapter_id[4:16]}"
    digest = put_adapter(platform, layout.adapter_prefix(tenant, adapter_id), name)
    for state in (JobState.PROVISIONING, JobState.RUNNING, JobState.EVALUATING):
        with platform.engine.begin() as conn:
            transition(conn, job_id, state, message="")
    put_checkpoint(platform, tenant, job_id, step=10, metrics={"train_loss": 0.25, "full_valid_loss": eval_loss}, final=True)
    row = {
        "id": adapter_id, "tenant_id": tenant, "name": name, "type": "lora_adapter", "base_model": spec.base_model,
        "base_digest": spec.base_digest, "job_id": job_id, "dataset_id": spec.dataset_id,
        "dataset_ids": [source.dataset_id for source in spec.sources], "pack_fingerprint": spec.pack_fingerprint,
        "spec_sha256": spec.sha256, "lock_sha256": spec.lock_sha256, "commit": spec.commit, "metrics": dict(scores or {}),
        "eval_report_key": "k", "eval_passed": stage != "quarantined", "rank": spec.lora.rank, "alpha": spec.lora.alpha,
        "modules": ["q_proj"], "object_prefix": layout.adapter_prefix(tenant, adapter_id), "manifest_sha256": digest, "created_at": now,
    }  # fmt: skip
    with platform.engine.begin() as conn:
        enter(conn, row, stage=stage)
        if failed:
            error = {"code": "gate_failed", "message": "it is worse than its base", "param": None}
            transition(conn, job_id, JobState.FAILED, message="", adapter_id=adapter_id, error=error)
        else:
            approved = {} if stage == "quarantined" else {"fine_tuned_model": name}
            transition(conn, job_id, JobState.SUCCEEDED, message="", adapter_id=adapter_id, **approved)
    return adapter_id


def enter(conn: Connection, row: Mapping[str, Any], *, stage: str) -> None:
    """Register the adapter of `row` as the registry does, and bring it to `stage` by legal moves."""
    conn.execute(sa.insert(adapters).values(**row, stage="quarantined" if stage == "quarantined" else "draft"))
    now = row["created_at"]
    dated: dict[str, dict[str, Any]] = {
        "production": {"promoted_at": now}, "deprecated": {"deprecated_at": now}, "archived": {"archived_at": now},
    }  # fmt: skip
    if stage not in ("draft", "quarantined"):
        conn.execute(sa.update(adapters).where(adapters.c.id == row["id"]).values(stage=stage, **dated.get(stage, {})))


def rewrite(conn: Connection, which: sa.ColumnElement[bool], **columns: Any) -> None:
    """Change registered adapters past every rule, for tests of those who meet such a record: nothing else can make one."""
    conn.execute(sa.text("SET LOCAL session_replication_role = replica"))
    dated = {"archived_at": sa.func.now()} if columns.get("stage") == "archived" else {}
    conn.execute(sa.update(adapters).where(which).values(**columns, **dated))


def put_checkpoint(
    platform: Platform, tenant: str, job_id: str, *, step: int, metrics: Mapping[str, float] | None = None, final: bool = False
) -> str:
    """A committed checkpoint with its files; returns its id."""
    prefix = layout.checkpoint_prefix(tenant, job_id, 1, step)
    row = {
        "id": f"ftckpt_{uuid.uuid4().hex[:24]}", "job_id": job_id, "attempt": 1, "step": step, "object_prefix": prefix,
        "manifest_sha256": put_adapter(platform, prefix, f"{job_id} {step}"), "metrics": dict(metrics or {}), "final": final,
        "created_at": platform.clock(),
    }  # fmt: skip
    with platform.engine.begin() as conn:
        conn.execute(sa.insert(checkpoints).values(**row))
    return str(row["id"])


def put_adapter(platform: Platform, prefix: str, content: str) -> str:
    """Adapter files under `prefix`, with their manifest; returns its sha256."""
    files = {"adapter_model.safetensors": content.encode(), "adapter_config.json": b'{"peft_type": "LORA"}', "optimizer.pt": b"state"}
    listed = {name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for name, data in files.items()}
    manifest = json.dumps({"format": 1, "files": listed}).encode()
    for name, data in {**files, "manifest.json": manifest}.items():
        platform.objects.put_bytes(f"{prefix}/{name}", data)
    return hashlib.sha256(manifest).hexdigest()


def files_under(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())
