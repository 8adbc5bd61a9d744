"""What crosses Dagster's queue: a run that holds what it needs, once."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import pytest
import sqlalchemy as sa
from dagster._core.test_utils import create_run_for_test

from control_plane.service import files, jobs, run_launches, tenants
from control_plane.service.due_runs import due_runs, replace_run
from control_plane.service.platform import Platform
from control_plane.service.submission import JobRequest
from control_plane.tables import attempts as attempts_table
from control_plane.tables import jobs as jobs_table
from control_plane.tables import reservations
from resources.run_coordinator import AdmissionRunCoordinator


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@pytest.fixture
def job(fresh_platform: Platform, write_chat_rows: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> tuple[Platform, str, str]:
    """A platform that the environment describes, with one job that validates its files."""
    monkeypatch.setenv("FT_DATABASE_URL", fresh_platform.engine.url.render_as_string(hide_password=False))
    monkeypatch.setenv("FT_HOME", str(fresh_platform.settings.home))
    owner, _ = tenants.create(fresh_platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    with write_chat_rows().open("rb") as rows:
        file = files.create(fresh_platform, owner.id, rows, filename="rows.jsonl", purpose="fine-tune")
    request = JobRequest.from_body({"model": "tiny-base", "training_file": file["id"]})
    return fresh_platform, owner.id, jobs.submit(fresh_platform, owner.id, request).job["id"]


def grant(platform: Platform, job_id: str, attempt: int) -> None:
    with platform.engine.begin() as conn:
        now = platform.clock()
        conn.execute(sa.insert(reservations).values(job_id=job_id, attempt=attempt, pool="local", num_gpus=1, granted_at=now))
        conn.execute(sa.insert(attempts_table).values(job_id=job_id, attempt=attempt, workload=f"{job_id}-a{attempt}"))
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == job_id).values(state="provisioning", attempt=attempt))


def give_back(platform: Platform, job_id: str) -> None:
    with platform.engine.begin() as conn:
        conn.execute(sa.update(reservations).where(reservations.c.job_id == job_id).values(released_at=platform.clock()))


def refusal(instance: dg.DagsterInstance, job_name: str, partition: str, **tags: str) -> str | None:
    named = {f"ft/{name}": value for name, value in tags.items()}
    run = create_run_for_test(instance, job_name=job_name, tags={"dagster/partition": partition, **named})
    return AdmissionRunCoordinator().refusal(run)


def test_training_without_a_reservation_or_for_one_that_was_given_back_is_refused(
    job: tuple[Platform, str, str], instance: dg.DagsterInstance
) -> None:
    platform, tenant, job_id = job
    key = f"{tenant}:{job_id}"
    assert "holds no reservation" in (refusal(instance, "train", key) or "")
    grant(platform, job_id, 1)
    give_back(platform, job_id)
    grant(platform, job_id, 2)
    told = refusal(instance, "train", key, attempt="1", run_key=f"{job_id}#a1.0")
    assert told is not None
    assert "attempt 1" in told
    assert "attempt 2 holds one now" in told
    assert "no reservation" in (refusal(instance, "train", f"somebody-else:{job_id}") or "")
    assert refusal(instance, "train", key, attempt="2", run_key=f"{job_id}#a2.0") is None


def test_a_key_has_one_run_whoever_asks_and_a_replaced_one_gets_another(
    job: tuple[Platform, str, str], instance: dg.DagsterInstance
) -> None:
    platform, tenant, job_id = job
    key = f"{tenant}:{job_id}"
    (due,) = due_runs(platform, ("prepare",))
    assert refusal(instance, "prepare", key, run_key=due.run_key, asked_by="nudge") is None
    assert "serves" in (refusal(instance, "prepare", key, run_key=due.run_key, asked_by="sensor") or "")
    assert run_launches.asked_by(platform) == {"nudge": 1}
    replace_run(platform, due)
    (again,) = due_runs(platform, ("prepare",))
    assert again.reason == "replaced"
    assert refusal(instance, "prepare", key, run_key=again.run_key, asked_by="sensor") is None
    grant(platform, job_id, 1)
    assert refusal(instance, "train", key) is None, "by hand, where nobody has asked"
    assert "serves" in (refusal(instance, "train", key, attempt="1", run_key=f"{job_id}#a1.0") or "")


def test_a_run_of_a_job_that_does_not_exist_is_refused(job: tuple[Platform, str, str], instance: dg.DagsterInstance) -> None:
    assert "there is no job" in (refusal(instance, "prepare", f"{job[1]}:ftjob-none", run_key="ftjob-none#prepare0") or "")
    assert refusal(instance, "reevaluate", f"{job[1]}:{job[2]}") is None
