"""How a run in Dagster ends whose attempt was stopped: as canceled, because nothing failed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import sqlalchemy as sa

from control_plane.jobs import service as jobs
from control_plane.platform.context import Platform
from control_plane.queue.cycle import release, run_cycle
from control_plane.queue.tables import reservations
from ft_assets.platform_resource import PlatformResource
from ft_assets.training.assets import checkpoint
from tests.support.jobs.queued_jobs import Queued


@pytest.fixture
def queued(fresh_platform: Platform, write_chat_rows: Callable[..., Path]) -> tuple[Platform, str, str]:
    """A job that waits for GPUs."""
    queue = Queued(platform=fresh_platform, write_rows=write_chat_rows)
    tenant = queue.tenant()
    return fresh_platform, tenant, queue.job(tenant)


def preempt(platform: Platform, tenant: str, job: str) -> None:
    """Ask the attempt to make room, as the scheduler does."""
    with platform.engine.begin() as conn:
        conn.execute(sa.update(reservations).where(reservations.c.job_id == job).values(stop_asked_at=platform.clock()))
        conn.execute(sa.text("UPDATE jobs SET stop_requested = 'preempt' WHERE id = :job"), {"job": job})


def cancel_and_release(platform: Platform, tenant: str, job: str) -> None:
    """Cancel it, and release its GPUs before its run looks for them."""
    jobs.cancel(platform, tenant, job)
    release(platform, job, 1)


def run_of(platform: Platform, tenant: str, job: str, monkeypatch: pytest.MonkeyPatch) -> tuple[dg.DagsterRunStatus, list[str]]:
    """Make the job's checkpoint in Dagster; returns how the run ended, and its messages."""
    monkeypatch.setenv("FT_DATABASE_URL", platform.engine.url.render_as_string(hide_password=False))
    monkeypatch.setenv("FT_HOME", str(platform.settings.home))
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("jobs", [f"{tenant}:{job}"])
        made = dg.materialize(
            [checkpoint],
            partition_key=f"{tenant}:{job}",
            instance=instance,
            resources={"platform": PlatformResource()},
            raise_on_error=False,
        )
        run = instance.get_run_by_id(made.run_id)
        assert run is not None
        return run.status, [str(entry.message) for entry in instance.all_logs(made.run_id)]


@pytest.mark.parametrize(
    ("stop", "state", "why"),
    [
        (preempt, "queued", "attempt 1 ended as preempted; the job is now queued"),
        (jobs.pause, "paused", "attempt 1 ended as paused; the job is now paused"),
        (jobs.cancel, "cancelled", "attempt 1 ended as cancelled; the job is now cancelled"),
        (cancel_and_release, "cancelled", "is cancelled and holds no reservation"),
    ],
)
def test_the_run_of_a_stopped_attempt_ends_as_canceled(
    queued: tuple[Platform, str, str], monkeypatch: pytest.MonkeyPatch, stop: Callable[..., Any], state: str, why: str
) -> None:
    platform, tenant, job = queued
    assert [type(decision).__name__ for decision in run_cycle(platform)] == ["Start"]
    stop(platform, tenant, job)
    status, messages = run_of(platform, tenant, job, monkeypatch)
    assert status is dg.DagsterRunStatus.CANCELED
    assert any(why in message for message in messages)
    assert jobs.get(platform, tenant, job).job.state == state


def test_the_run_of_a_job_without_a_reservation_fails(queued: tuple[Platform, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    status, messages = run_of(*queued, monkeypatch)
    assert status is dg.DagsterRunStatus.FAILURE
    assert not any("CANCEL" in message.upper() for message in messages)
