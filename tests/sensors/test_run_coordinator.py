"""What crosses Dagster's queue: a run that holds what it needs, once."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import dagster as dg
import pytest
import sqlalchemy as sa
from dagster._check import CheckError
from dagster._core.run_coordinator import SubmitRunContext
from dagster._core.test_utils import create_run_for_test

from control_plane.attempts.tables import attempts as attempts_table
from control_plane.datasets.uploads import uploaded_files
from control_plane.evaluations import service as evaluations
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.platform.context import Platform
from control_plane.queue.cycle import run_cycle
from control_plane.queue.launches import due_runs, replace_run
from control_plane.queue.tables import reservations
from control_plane.tenants import service as tenants
from engine.scheduler import Start
from resources.launcher.local_processes import LocalLauncher
from sensors.evaluation_requests import due_requests
from sensors.run_coordinator import AdmissionRunCoordinator
from sensors.run_requests import missing
from tests.support.jobs import launched_runs
from tests.support.jobs.registered_adapter import add_adapter


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
        file = uploaded_files.create(fresh_platform, owner.id, rows, filename="rows.jsonl", purpose="fine-tune")
    request = JobRequest.from_body({"model": "tiny-base", "training_file": file.id})
    return fresh_platform, owner.id, jobs.submit(fresh_platform, owner.id, request).job.id


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
    named = {f"dagster/ft_{name}": value for name, value in tags.items()}
    run = create_run_for_test(instance, job_name=job_name, tags={"dagster/partition": partition, **named})
    return AdmissionRunCoordinator().judge(run)[0]


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
    assert refusal(instance, "prepare", key, run_key=due.run_key, asked_by="queue-listener") is None
    assert "serves" in (refusal(instance, "prepare", key, run_key=due.run_key, asked_by="sensor") or "")
    assert launched_runs.runs_by_requester(platform) == {"queue-listener": 1}
    replace_run(platform, due)
    (again,) = due_runs(platform, ("prepare",))
    assert again.reason == "replaced"
    assert refusal(instance, "prepare", key, run_key=again.run_key, asked_by="sensor") is None
    grant(platform, job_id, 1)
    assert refusal(instance, "train", key) is None, "by hand, where nobody has asked"
    assert "serves" in (refusal(instance, "train", key, attempt="1", run_key=f"{job_id}#a1.0") or "")


def test_a_run_of_a_job_that_does_not_exist_is_refused(job: tuple[Platform, str, str], instance: dg.DagsterInstance) -> None:
    assert "there is no job" in (refusal(instance, "prepare", f"{job[1]}:ftjob-none", run_key="ftjob-none#prepare0") or "")
    assert "there is no job" in (refusal(instance, "prepare", f"somebody-else:{job[2]}") or ""), "that tenant has no such job"
    assert refusal(instance, "reevaluate", f"{job[1]}:{job[2]}") is None


def test_a_run_by_hand_without_a_key_serves_what_is_due_and_a_second_one_is_refused(
    job: tuple[Platform, str, str], instance: dg.DagsterInstance
) -> None:
    platform, tenant, job_id = job
    key = f"{tenant}:{job_id}"
    assert refusal(instance, "prepare", key) is None
    assert "serves" in (refusal(instance, "prepare", key) or "")
    assert missing(platform, instance, due_runs(platform, ("prepare",)), by="sensor") == [], "nobody asks for what a run by hand serves"
    with platform.engine.begin() as conn:
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == job_id).values(state="evaluating"))
    assert due_runs(platform, ("evaluate",)) == [], "it waits for a GPU"
    assert [type(d) for d in run_cycle(platform)] == [Start]
    (due,) = due_runs(platform, ("evaluate",))
    assert (due.attempt, due.num_gpus, due.run_key) == (1, 1, f"{job_id}#evaluate0")
    assert "holds no reservation" in (refusal(instance, "train", key) or ""), "that of an evaluation trains nothing"
    assert refusal(instance, "evaluate", key, run_key=due.run_key, asked_by="sensor") is None
    assert f"serves {due.run_key}" in (refusal(instance, "evaluate", key) or "")


def test_a_run_by_hand_takes_the_slot_of_its_own_tenant_whatever_its_tags_say(
    job: tuple[Platform, str, str], instance: dg.DagsterInstance
) -> None:
    platform, tenant, job_id = job
    (due,) = due_runs(platform, ("prepare",))
    told = {"dagster/ft_prepare_slot": "somebody-else", "dagster/ft_run_key": due.run_key}
    run = create_run_for_test(instance, job_name="prepare", tags={"dagster/partition": f"{tenant}:{job_id}", **told})
    coordinator = AdmissionRunCoordinator()
    coordinator.register_instance(instance)
    with pytest.raises(Exception, match="required for queued runs"):  # the test's run has no code location
        coordinator.submit_run(SubmitRunContext(run, workspace=None))  # type: ignore[arg-type]
    found = instance.get_run_by_id(run.run_id)
    assert found is not None
    assert (found.tags["dagster/ft_prepare_slot"], found.tags["dagster/ft_run_key"]) == (tenant, due.run_key)


def test_where_nothing_is_due_an_operator_may_run_it_again_as_often_as_they_like(
    job: tuple[Platform, str, str], instance: dg.DagsterInstance
) -> None:
    platform, tenant, job_id = job
    with platform.engine.begin() as conn:
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == job_id).values(state="succeeded"))
    key = f"{tenant}:{job_id}"
    assert [refusal(instance, stage, key) for stage in ("evaluate", "evaluate", "prepare")] == [None, None, None]
    tags = {"dagster/partition": key, "dagster/ft_run_key": f"{job_id}#evaluate0", "dagster/parent_run_id": str(uuid.uuid4())}
    again = create_run_for_test(instance, job_name="evaluate", tags=tags)
    assert AdmissionRunCoordinator().judge(again) == (None, ""), "a re-execution in Dagster's UI has the tags of its parent"


def test_a_key_of_another_job_or_of_a_run_that_was_given_up_is_refused(
    job: tuple[Platform, str, str], instance: dg.DagsterInstance
) -> None:
    platform, tenant, job_id = job
    key = f"{tenant}:{job_id}"
    assert "another job" in (refusal(instance, "prepare", key, run_key="ftjob-b#prepare0") or "")
    (due,) = due_runs(platform, ("prepare",))
    replace_run(platform, due)
    assert f"it needs {job_id}#prepare1 now" in (refusal(instance, "prepare", key, run_key=due.run_key) or "")


def test_a_run_that_was_turned_away_does_not_stand_for_the_one_that_serves(
    job: tuple[Platform, str, str], instance: dg.DagsterInstance
) -> None:
    platform, tenant, job_id = job
    (due,) = due_runs(platform, ("prepare",))
    coordinator = AdmissionRunCoordinator()
    coordinator.register_instance(instance)
    first, second = (
        create_run_for_test(
            instance, job_name="prepare", tags={"dagster/partition": f"{tenant}:{job_id}", "dagster/ft_run_key": due.run_key}
        )
        for _ in range(2)
    )
    assert coordinator.judge(first) == (None, due.run_key)
    refused = coordinator.submit_run(SubmitRunContext(second, workspace=None))  # type: ignore[arg-type]
    assert refused.status is dg.DagsterRunStatus.CANCELED
    assert refused.tags["dagster/ft_refused_run_key"] == due.run_key
    assert [run.run_id for run in instance.get_runs(dg.RunsFilter(tags={"dagster/ft_run_key": due.run_key}))] == [first.run_id]


def submitted(instance: dg.DagsterInstance, tags: Mapping[str, str]) -> dg.DagsterRun:
    """What Dagster's queue has made of a run of an ordered evaluation."""
    coordinator = AdmissionRunCoordinator()
    coordinator.register_instance(instance)
    run = create_run_for_test(instance, job_name="reevaluate", tags=dict(tags))
    with suppress(CheckError):  # the test's run has no code location
        coordinator.submit_run(SubmitRunContext(run, workspace=None))  # type: ignore[arg-type]
    found = instance.get_run_by_id(run.run_id)
    assert found is not None
    return found


def test_an_ordered_evaluation_has_one_run_and_another_one_after_it_died(
    job: tuple[Platform, str, str], instance: dg.DagsterInstance
) -> None:
    platform, tenant, _ = job
    digest = platform.models.get("tiny-base").digest
    adapter = add_adapter(platform, tenant, name=f"ft:tiny-base:{tenant}:x:1", stage="production", loaded=False, base_digest=digest)
    order = evaluations.request(platform, tenant, adapter)
    run_cycle(platform)
    launcher = LocalLauncher(platform.settings.work_dir / "launcher")
    (request,) = due_requests(platform, instance, launcher)
    tags = {**request.tags, "dagster/partition": str(request.partition_key)}
    first, second = submitted(instance, tags), submitted(instance, tags)
    assert first.tags["dagster/ft_run_key"] == f"{order.id}#0"
    assert (second.status, second.tags["dagster/ft_refused_run_key"]) == (dg.DagsterRunStatus.CANCELED, f"{order.id}#0")
    again = submitted(instance, {**tags, "dagster/parent_run_id": first.run_id})
    assert (again.status, again.tags["dagster/ft_run_key"]) != (dg.DagsterRunStatus.CANCELED, f"{order.id}#0"), "by hand in Dagster's UI"
    assert due_requests(platform, instance, launcher) == []
    instance.report_run_failed(first)
    time.sleep(2.1)  # a run that ended just now may still have written something
    assert due_requests(platform, instance, launcher) == []
    assert [request.run_key for request in due_requests(platform, instance, launcher)] == [f"{order.id}#1"]
    assert "needs no run" in (refusal(instance, "reevaluate", str(request.partition_key), run_key=f"{order.id}#0") or "")
