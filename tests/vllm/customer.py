"""A tenant with what its jobs left: adapters of the tiny model, registered and promoted through the service itself."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import sqlalchemy as sa
from safetensors.numpy import load_file, save_file

from control_plane.adapters import promotions
from control_plane.adapters import service as adapters
from control_plane.adapters.tables import Adapter
from control_plane.datasets.tables import files
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.serving.rollout import reconcile
from engine.adapters.package import ADAPTER_WEIGHTS
from engine.evals.gate.verdict import Verdict
from engine.evals.scoring.report import EvalReport
from tests.support.jobs.registered_adapter import add_dataset
from tests.support.models.tiny_adapter import Arrays, build_tiny_adapter
from tests.vllm.vllm_server import SERVED

PASSED = Verdict(outcome="passed", findings=())
REPORT = EvalReport(
    base_model=SERVED, base_digest="b", adapter_manifest_sha256="a", suite_digest="s", adapter_applied=True, max_logit_difference=1.0,
    literal=True, scores=(), golden_faults=(), samples=(), seconds=1.0,
)  # fmt: skip
Change = Callable[[Arrays], Arrays]


@dataclass(frozen=True, kw_only=True)
class Customer:
    """A tenant of its own for one test."""

    platform: Platform
    id: str
    base: Path
    scratch: Path

    def job(self, *, suffix: str = "support", **changes: object) -> str:
        job_id, file_id, now = f"ftjob-{uuid.uuid4().hex[:12]}", f"file-{uuid.uuid4().hex[:12]}", datetime.now(UTC)
        file = {"id": file_id, "tenant_id": self.id, "filename": "f", "purpose": "fine-tune", "bytes": 1, "sha256": "x"}
        job = {
            "id": job_id, "tenant_id": self.id, "state": "evaluating", "tier": "standard", "model": SERVED,
            "base_digest": self.platform.models.get(SERVED).digest, "method": "sft", "training_file": file_id, "suffix": suffix, "seed": 0,
            "request": {}, "request_sha256": "r", "hyperparameters": {}, "dataset_id": "ds_1", "pack_fingerprint": "p",
            "spec": {"lock_sha256": "1" * 64, "commit": "c"}, "spec_sha256": "5" * 64, "created_at": now,
        }  # fmt: skip
        with self.platform.engine.begin() as conn:
            conn.execute(sa.insert(files).values(**file, object_key="k", status="processed", created_at=now))
            add_dataset(conn, self.id, "ds_1", now=now)
            conn.execute(sa.insert(jobs).values(**{**job, **changes}))
        return job_id

    def trained(self, *, seed: int = 0, rank: int = 8, change: Change = lambda arrays: arrays, **config: object) -> Path:
        """What a training left: random weights, which change what the model says."""
        made = self.scratch / uuid.uuid4().hex
        build_tiny_adapter(made, self.base, base_name="trained-at", rank=rank, seed=seed, scale=0.05, config=config)
        save_file(change(load_file(made / ADAPTER_WEIGHTS)), made / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        return made

    def register(self, directory: Path, **job: object) -> Adapter:
        job_id = self.job(**job)  # type: ignore[arg-type]
        made, _ = adapters.register(
            self.platform, tenant=self.id, job_id=job_id, directory=directory, report=REPORT, verdict=PASSED, eval_report_key="k"
        )
        return made

    def promoted(self, **how: object) -> Adapter:
        made = self.register(self.trained(**how))  # type: ignore[arg-type]
        return promotions.promote(self.platform, self.id, made.id)

    def files(self, adapter: Adapter) -> Path:
        """Where the servers have it from."""
        return self.platform.settings.work_dir / "adapters" / adapter.id

    def withdraw_all(self) -> None:
        for row in adapters.list_adapters(self.platform, self.id, stage="production", limit=100).items:
            promotions.deprecate(self.platform, self.id, str(row.id))
        reconcile(self.platform)


def nan_in(arrays: Arrays) -> Arrays:
    name = next(n for n in arrays if n.endswith("q_proj.lora_B.weight"))
    return {**arrays, name: np.full_like(arrays[name], np.nan)}
