"""Really packed jobs: a sweep tokenizes once, an equal spec is found again, and a warm start is part of the spec."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.sweeps import service as sweeps
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.jobs.transitions import transition
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.tenants import service as tenants
from core import layout
from core.base_models import Catalogue
from core.telemetry import provenance
from ft_assets.datasets import step
from tests.support.jobs.finished_job import COMMIT, enter, put_adapter, put_checkpoint
from tests.support.models.tiny_model import build_tiny_model


@pytest.fixture(autouse=True)
def installed_commit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FT_COMMIT", COMMIT)
    provenance.commit.cache_clear()
    yield
    provenance.commit.cache_clear()


@pytest.fixture(scope="module")
def platform(new_platform: Callable[..., Platform], tmp_path_factory: pytest.TempPathFactory) -> Platform:
    model = build_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    return replace(new_platform(), models=Catalogue({"tiny": ({"id": "tiny", "path": str(model)}, model)}))


@pytest.fixture
def body(platform: Platform, write_chat_rows: Callable[..., Path]) -> dict[str, Any]:
    """A request of a tenant of its own, whose id is its ``tenant``."""
    owner, _ = tenants.create(platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    with write_chat_rows().open("rb") as stream:
        file = uploaded_files.create(platform, owner.id, stream, filename="rows.jsonl", purpose="fine-tune")
    return {"tenant": owner.id, "model": "tiny", "training_file": file.id, "seed": 5, "hyperparameters": {"rank": 8, "n_epochs": 1}}


def submitted(platform: Platform, body: dict[str, Any], **fields: Any) -> str:
    asked = {k: v for k, v in (body | fields).items() if k != "tenant"}
    return str(jobs.submit(platform, body["tenant"], JobRequest.from_body(asked)).job.id)


def packed(platform: Platform, tenant: str, job_id: str) -> tuple[step.Packed, Any]:
    step.pin_dataset(platform, tenant, job_id)
    found = step.pack(platform, tenant, job_id)
    with platform.engine.connect() as conn:
        return found, conn.execute(sa.select(jobs_table).where(jobs_table.c.id == job_id)).one()


def test_the_trials_of_a_sweep_share_one_pack(platform: Platform, body: dict[str, Any]) -> None:
    tenant = body.pop("tenant")
    made = sweeps.create(platform, tenant, {**body, "sweep": {"parameters": {"learning_rate": [1e-4, 2e-4], "n_epochs": [1, 2]}}})
    done = [packed(platform, tenant, str(t.job_id)) for t in made.trials]
    assert [p.reused for p, _ in done] == [False, True, True, True]
    assert len({p.manifest.fingerprint for p, _ in done}) == 1
    assert len({row.spec_sha256 for _, row in done}) == 4
    assert sweeps.compare(platform, tenant, made.id).differing.keys() == {
        "learning_rate", "n_epochs", "batch_size", "accumulation_steps",  # more epochs leave room for a larger default batch
    }  # fmt: skip


def test_a_job_with_an_equal_spec_ends_with_the_adapter_that_is_there(platform: Platform, body: dict[str, Any]) -> None:
    tenant = body["tenant"]
    first = submitted(platform, body)
    _, row = packed(platform, tenant, first)
    assert row.state == "queued"
    adapter_id, name = f"adp-{uuid.uuid4().hex[:12]}", f"ft:tiny:{tenant}::{uuid.uuid4().hex[:8]}"
    prefix = layout.adapter_prefix(tenant, adapter_id)
    values = {
        "id": adapter_id, "tenant_id": tenant, "name": name, "type": "lora_adapter", "base_model": "tiny", "metrics": {},
        "base_digest": row.base_digest, "job_id": first, "dataset_id": row.dataset_id, "pack_fingerprint": row.pack_fingerprint,
        "spec_sha256": row.spec_sha256, "lock_sha256": row.spec["lock_sha256"], "commit": COMMIT, "eval_report_key": "k",
        "eval_passed": True, "rank": 8, "alpha": 16.0, "modules": ["q_proj"], "object_prefix": prefix,
        "manifest_sha256": put_adapter(platform, prefix, name),
        "created_at": platform.clock(),
    }  # fmt: skip
    with platform.engine.begin() as conn:
        enter(conn, values, stage="production")
        for state in (JobState.PROVISIONING, JobState.RUNNING, JobState.EVALUATING):
            transition(conn, first, state, message="")
        transition(conn, first, JobState.SUCCEEDED, message="", adapter_id=adapter_id, fine_tuned_model=name)
    assert submitted(platform, body) == first
    second = submitted(platform, body, metadata={"a": "b"})
    _, ended = packed(platform, tenant, second)
    assert (ended.state, ended.reused_job_id, ended.fine_tuned_model) == ("succeeded", first, name)
    forced = submitted(platform, body, force=True)
    _, trained = packed(platform, tenant, forced)
    assert (trained.state, trained.spec_sha256) == ("queued", row.spec_sha256), "the same spec, trained all the same"
    warm = submitted(platform, body, warm_start=adapter_id)
    _, other = packed(platform, tenant, warm)
    assert other.state == "queued", "another start is another spec"
    assert other.spec["warm_start"] == {"adapter": name, "manifest_sha256": values["manifest_sha256"]}


def test_a_warm_start_from_a_checkpoint_is_frozen_with_its_bytes(platform: Platform, body: dict[str, Any]) -> None:
    tenant = body["tenant"]
    first = submitted(platform, body)
    packed(platform, tenant, first)
    checkpoint = put_checkpoint(platform, tenant, first, step=3)
    _, row = packed(platform, tenant, submitted(platform, body, model=f"{first}:step-3"))
    assert row.model == "tiny"
    assert row.spec["warm_start"]["adapter"] == f"{first}:step-3"
    assert row.spec["warm_start"]["manifest_sha256"] == row.warm_start["manifest_sha256"]
    assert row.warm_start["checkpoint_id"] == checkpoint
