"""Specs that an older platform froze: shown as far as they tell, and never trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.attempts import service as attempts
from control_plane.attempts import start
from control_plane.attempts.service import Claim
from control_plane.attempts.tables import attempts as attempts_table
from control_plane.billing.tables import ledger_entries
from control_plane.jobs import responses
from control_plane.jobs import service as jobs
from control_plane.jobs.sweeps import comparison
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.queue.tables import reservations
from core.errors import NotAdmitted
from tests.support.jobs.started_job import start_job

FIRST_FORMAT: dict[str, Any] = {
    "method": "sft",
    "adapter": "lora",
    "base_model": "tiny-base",
    "base_digest": "sha256:0",
    "pack_fingerprint": "pk_0",
    "dataset_id": "ds_0",
    "max_seq_len": 128,
    "optimization": {
        "learning_rate": 0.001,
        "num_epochs": 3.0,
        "windows_per_device": 4,
        "accumulation_steps": 2,
        "schedule": "cosine",
        "warmup_ratio": 0.03,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "adam_betas": [0.9, 0.999],
        "optimizer": "adamw_torch",
        "max_steps": None,
    },
    "lora": {"rank": 8, "alpha": 16, "dropout": 0.05, "target_modules": "all-linear"},
    "checkpoint": {"every_steps": 500, "every_s": 600.0, "keep_last": 3},
    "precision": "fp32",
    "gradient_checkpointing": False,
    "world_size": 1,
    "seed": 1,
    "recipe": "demo-lora@1",
    "lock_sha256": "0",
    "commit": "0",
    "image": "local",
}
"""As the first version of the platform froze them."""


@dataclass
class Stopping:
    """A launcher that is told to stop workloads, and starts none."""

    stopped: list[str] = field(default_factory=list)

    def stop(self, name: str, *, grace_s: float) -> None:
        self.stopped.append(name)


@pytest.fixture
def held(fresh_platform: Platform, write_chat_rows: Callable[..., Any]) -> Claim:
    """A started attempt of a job whose spec is of the first format."""
    claim = start_job(fresh_platform, write_chat_rows)
    freeze(fresh_platform, claim, FIRST_FORMAT)
    return claim


def freeze(platform: Platform, claim: Claim, spec: dict[str, Any]) -> None:
    with platform.engine.begin() as conn:
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == claim.job_id).values(spec=spec))


@pytest.mark.parametrize("spec", [FIRST_FORMAT, {"method": "sft"}, {**FIRST_FORMAT, "optimization": None, "of_tomorrow": {"a": 1}}])
def test_a_job_with_a_spec_of_another_format_is_shown_and_listed(fresh_platform: Platform, held: Claim, spec: dict[str, Any]) -> None:
    freeze(fresh_platform, held, spec)
    now = fresh_platform.clock()
    at_once = replace(fresh_platform, clock=lambda: now)  # the cost of a running attempt grows
    shown = responses.job(jobs.get(at_once, held.tenant, held.job_id))
    assert [responses.job(v) for v in jobs.list_jobs(at_once, held.tenant).items] == [shown]
    expected = {"n_epochs": 3, "batch_size": 8} if spec == FIRST_FORMAT else {"n_epochs": "auto", "batch_size": "auto"}
    assert shown.hyperparameters == expected | {"learning_rate_multiplier": 1.0}
    assert shown.recipe == spec.get("recipe")


def test_it_is_compared_by_what_it_tells(fresh_platform: Platform, held: Claim) -> None:
    found = comparison.hyperparameters(jobs.get(fresh_platform, held.tenant, held.job_id).job)
    assert (found["rank"], found["n_epochs"], found["batch_size"], found["learning_rate"]) == (8, 3.0, 8, 0.001)


def test_it_ends_its_job_and_its_workload_instead_of_one_run_after_the_other(fresh_platform: Platform, held: Claim) -> None:
    launcher: Any = Stopping()
    with pytest.raises(NotAdmitted, match="frozen by another version") as refused:
        start.take(fresh_platform, launcher, held.tenant, held.job_id)
    assert refused.value.code == attempts.UNREADABLE
    assert launcher.stopped == [held.workload]
    row = jobs.get(fresh_platform, held.tenant, held.job_id).job
    assert (row.state, row.error["code"]) == (JobState.FAILED, "spec_unreadable")
    assert "submit the job again" in row.error["message"]
    with fresh_platform.engine.connect() as conn:
        assert conn.execute(sa.select(reservations.c.job_id).where(reservations.c.released_at.is_(None))).all() == []
        assert conn.execute(sa.select(attempts_table.c.outcome)).scalars().all() == ["spec_unreadable"]
        assert conn.execute(sa.select(sa.func.coalesce(sa.func.sum(ledger_entries.c.amount_micros), 0))).scalar_one() == 0
    with pytest.raises(NotAdmitted, match="holds no reservation"):
        start.take(fresh_platform, launcher, held.tenant, held.job_id)
    assert launcher.stopped == [held.workload]


def test_a_readable_spec_is_taken(fresh_platform: Platform, write_chat_rows: Callable[..., Any]) -> None:
    launcher: Any = Stopping()
    claim = start_job(fresh_platform, write_chat_rows)
    assert start.take(fresh_platform, launcher, claim.tenant, claim.job_id) == claim
    assert launcher.stopped == []
