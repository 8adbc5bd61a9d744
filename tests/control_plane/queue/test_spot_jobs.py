"""Which jobs may use spot GPUs: those that ask for them, unless they are to replace a model in production."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.queue.snapshot import queue_snapshot
from tests.support.jobs.queued_jobs import Queued, queued
from tests.support.jobs.registered_adapter import add_adapter


@pytest.fixture
def world(fresh_platform: Platform, write_chat_rows: Callable[..., Path]) -> Queued:
    return queued(fresh_platform, write_chat_rows)


@pytest.mark.parametrize(
    ("changes", "stage", "spot"),
    [
        pytest.param({}, None, True, id="no model is in production"),
        pytest.param({}, "production", False, id="its model is in production"),
        pytest.param({"request": {"spot": True, "auto_promote": False}}, "production", True, id="it is not promoted by itself"),
        pytest.param({"suffix": "other"}, "production", True, id="another model is in production"),
        pytest.param({}, "draft", True, id="its model is not in production"),
        pytest.param({"request": {}}, None, False, id="it does not ask for spot"),
        pytest.param({"request": {"spot": None}}, None, False, id="it leaves spot open"),
    ],
)
def test_job_that_replaces_a_model_in_production_runs_on_demand(
    world: Queued, changes: dict[str, Any], stage: str | None, spot: bool
) -> None:
    tenant = world.tenant()
    job = world.job(tenant, gpus=1, hours=9)
    values = {"request": {"spot": True}, "suffix": "Support Bot"} | changes
    with world.platform.engine.begin() as conn:
        conn.execute(sa.update(jobs).where(jobs.c.id == job).values(values))
        base = conn.execute(sa.select(jobs.c.model).where(jobs.c.id == job)).scalar_one()
    if stage is not None:
        add_adapter(world.platform, tenant, name=f"ft:{base}:{tenant}:support-bot:abc", stage=stage, loaded=False, base_model=base)
    (waiting,) = queue_snapshot(world.platform).waiting
    assert (waiting.job_id, waiting.spot) == (job, spot)
