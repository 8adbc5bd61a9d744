"""Rows of a registered adapter, for tests of those who read them: linked like real ones, without their objects."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection

from control_plane.datasets.tables import datasets, files
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.serving.tables import deployments
from core import layout
from tests.support.jobs.finished_job import COMMIT, enter

BASE_DIGEST = hashlib.sha256(b"base").hexdigest()


def add_dataset(conn: Connection, tenant: str, dataset_id: str, *, now: datetime) -> None:
    """The dataset version that a job names, once; its objects are not stored."""
    row = {"id": dataset_id, "name": dataset_id, "version": 1, "format": "chat", "row_count": 1, "uri": "file:///rows", "report": {}}
    digest = hashlib.sha256(dataset_id.encode()).hexdigest()
    values = {**row, "tenant_id": tenant, "content_sha256": digest, "created_at": now}
    conn.execute(insert(datasets).values(**values).on_conflict_do_nothing())


def add_adapter(
    platform: Platform,
    tenant: str,
    *,
    name: str,
    stage: str,
    loaded: bool,
    metrics: Mapping[str, float] | None = None,
    base_model: str = "tiny-base",
    base_digest: str = BASE_DIGEST,
    eval_config: Mapping[str, Any] | None = None,
    dataset_id: str | None = None,
) -> str:
    """A registered adapter with the job, dataset and file that its row needs, and its deployment if it is to be loaded.

    It was trained on `dataset_id`, or on one of its own, whose objects are not stored.
    """
    now, adapter_id = platform.clock(), f"adp-{uuid.uuid4().hex[:12]}"
    file_id, job_id, dataset_id = f"file-{adapter_id}", f"ftjob-{adapter_id}", dataset_id or f"ds_{adapter_id}"
    sha256 = hashlib.sha256(adapter_id.encode()).hexdigest()
    file = {"id": file_id, "filename": "f", "purpose": "fine-tune", "bytes": 1, "sha256": sha256, "dataset_id": dataset_id}
    links = {"base_digest": base_digest, "dataset_id": dataset_id, "pack_fingerprint": "pk_0", "spec_sha256": sha256}
    job = {"id": job_id, "state": "succeeded", "tier": "standard", "model": base_model, "spec": {}, "training_file": file_id}
    rest = {
        "method": "sft",
        "seed": 1,
        "request": {"eval_config": dict(eval_config)} if eval_config else {},
        "request_sha256": sha256,
        "hyperparameters": {},
    }
    row = {
        "id": adapter_id, "tenant_id": tenant, "name": name, "type": "lora_adapter", "base_model": base_model, "job_id": job_id, **links,
        "lock_sha256": sha256, "commit": COMMIT, "eval_report_key": f"{layout.eval_prefix(tenant, job_id)}/report.json",
        "manifest_sha256": sha256, "metrics": dict(metrics or {"loss": 1.0}), "eval_passed": stage != "quarantined", "rank": 8,
        "alpha": 16.0, "modules": ["q"], "object_prefix": layout.adapter_prefix(tenant, adapter_id), "created_at": now,
    }  # fmt: skip
    with platform.engine.begin() as conn:
        key = layout.file_key(tenant, file_id, "f")
        conn.execute(sa.insert(files).values(**file, tenant_id=tenant, object_key=key, status="processed", created_at=now))
        add_dataset(conn, tenant, dataset_id, now=now)
        conn.execute(sa.insert(jobs).values(**job, **links, **rest, tenant_id=tenant, created_at=now))
        enter(conn, row, stage=stage)
        if loaded:
            state = {"desired": "loaded", "observed": "loaded", "updated_at": now}
            conn.execute(sa.insert(deployments).values(adapter_id=adapter_id, name=name, **state))
    return adapter_id
