"""Rows of a registered adapter, for tests of those who read them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

import sqlalchemy as sa

from control_plane.service.platform import Platform
from control_plane.tables import adapters, deployments, jobs


def add_adapter(platform: Platform, tenant: str, *, name: str, stage: str, loaded: bool, metrics: Mapping[str, float] | None = None) -> str:
    """A registered adapter with all that its row needs, and its deployment if it is to be loaded."""
    now, adapter_id = platform.clock(), f"adp-{uuid.uuid4().hex[:12]}"
    with platform.engine.begin() as conn:
        file_id, job_id = f"file-{adapter_id}", f"ftjob-{adapter_id}"
        file = {"id": file_id, "tenant_id": tenant, "filename": "f", "purpose": "fine-tune", "bytes": 1, "sha256": "0", "object_key": "k"}
        conn.execute(
            sa.insert(sa.table("files", *map(sa.column, [*file, "status", "created_at"]))).values(
                **file, status="processed", created_at=now
            )
        )
        job = {"id": job_id, "tenant_id": tenant, "state": "succeeded", "tier": "standard", "model": "tiny-base", "base_digest": "0"}
        rest = {"method": "sft", "training_file": file_id, "seed": 1, "request": {}, "request_sha256": "0", "hyperparameters": {}}
        conn.execute(sa.insert(jobs).values(**job, **rest, created_at=now))
        lineage = dict.fromkeys(
            ("dataset_id", "pack_fingerprint", "spec_sha256", "lock_sha256", "commit", "eval_report_key", "manifest_sha256"), "0"
        )
        row = {"id": adapter_id, "tenant_id": tenant, "name": name, "type": "lora_adapter", "base_model": "tiny-base", "base_digest": "0"}
        more = {
            "job_id": job_id,
            "metrics": dict(metrics or {"loss": 1.0}),
            "eval_passed": True,
            "rank": 8,
            "alpha": 16.0,
            "modules": ["q"],
            "object_prefix": "p",
        }
        conn.execute(sa.insert(adapters).values(**row, **lineage, **more, stage=stage, created_at=now))
        if loaded:
            state = {"desired": "loaded", "observed": "loaded", "updated_at": now}
            conn.execute(sa.insert(deployments).values(adapter_id=adapter_id, name=name, **state))
    return adapter_id
