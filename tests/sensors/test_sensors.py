"""Sensors: they ask for what the present state needs, once, and replace runs that died without moving their job."""

from __future__ import annotations

import json
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest
import sqlalchemy as sa
from dagster._core.test_utils import create_run_for_test, instance_for_test

from agent.messages import Exit
from control_plane.attempts import evaluation_endings
from control_plane.attempts import service as attempts
from control_plane.attempts.claims import Claim
from control_plane.billing import refunds
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.platform.context import Platform
from control_plane.platform.protocols import WorkloadPhase, WorkloadStatus
from control_plane.queue import launches
from control_plane.tenants import service as tenants
from core.errors import Fault
from engine.training.failures import Retry, StopReason
from ft_assets.platform_resource import PlatformResource
from resources.dagster.run_records import record_path, runs_dir
from resources.launcher import LocalLauncher
from resources.launcher.process_identity import identity
from sensors import recovery
from sensors.admission import admission
from sensors.recovery import HUNG, MAX_REPLACEMENTS, SETTLED, UNQUEUED, failures, why_gone
from sensors.scheduling_cycle import scheduling as scheduling_sensor
from tests.support.jobs.claimed_job import ending, failure, held_by, ledger
from tests.support.jobs.started_job import start_job


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@pytest.fixture
def submitted(fresh_platform: Platform, write_chat_rows: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> tuple[Platform, str, str]:
    """A platform that the environment describes, with one job that validates its files."""
    monkeypatch.setenv("FT_DATABASE_URL", fresh_platform.engine.url.render_as_string(hide_password=False))
    monkeypatch.setenv("FT_HOME", str(fresh_platform.settings.home))
    owner, _ = tenants.create(fresh_platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    with write_chat_rows().open("rb") as rows:
        file = uploaded_files.create(fresh_platform, owner.id, rows, filename="rows.jsonl", purpose="fine-tune")
    request = JobRequest.from_body({"model": "tiny-base", "training_file": file.id})
    return fresh_platform, owner.id, jobs.submit(fresh_platform, owner.id, request).job.id


def tick(sensor: dg.SensorDefinition, instance: dg.DagsterInstance) -> dg.SensorResult | dg.SkipReason:
    with dg.build_sensor_context(instance=instance, resources={"platform": PlatformResource()}) as context:
        result = sensor(context)
    assert isinstance(result, dg.SensorResult | dg.SkipReason)
    return result


def test_a_submitted_job_gets_its_partition_and_its_preparation(submitted: tuple[Platform, str, str], instance: dg.DagsterInstance) -> None:
    _, tenant, job_id = submitted
    result = tick(admission, instance)
    assert isinstance(result, dg.SensorResult)
    assert result.run_requests is not None
    (request,) = result.run_requests
    assert (request.partition_key, request.job_name, request.run_key) == (f"{tenant}:{job_id}", "prepare", f"{job_id}#prepare0")
    assert result.dynamic_partitions_requests is not None
    assert result.dynamic_partitions_requests[0].partition_keys == [f"{tenant}:{job_id}"]


def test_a_run_that_lives_is_not_asked_for_again(submitted: tuple[Platform, str, str], instance: dg.DagsterInstance) -> None:
    _, _, job_id = submitted
    create_run_for_test(instance, job_name="prepare", tags={"dagster/ft_run_key": f"{job_id}#prepare0"}, status=dg.DagsterRunStatus.STARTED)
    assert isinstance(tick(admission, instance), dg.SkipReason)


def test_nothing_is_trained_that_was_not_queued(submitted: tuple[Platform, str, str], instance: dg.DagsterInstance) -> None:
    result = tick(scheduling_sensor, instance)
    assert isinstance(result, dg.SensorResult)
    assert result.run_requests == []


def test_a_run_that_failed_without_moving_its_job_is_replaced_and_in_the_end_the_job_fails(
    submitted: tuple[Platform, str, str], instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "FIRST_PAUSE", timedelta(0))
    platform, tenant, job_id = submitted
    for attempt in range(MAX_REPLACEMENTS):
        (due,) = launches.due_runs(platform, ("prepare",))
        assert due.run_key == f"{job_id}#prepare{attempt}"
        create_run_for_test(instance, job_name="prepare", tags={"dagster/ft_run_key": due.run_key}, status=dg.DagsterRunStatus.FAILURE)
        time.sleep(SETTLED.total_seconds() + 0.1)
        assert due.run_key in str(tick(failures, instance))
    job = jobs.get(platform, tenant, job_id).job
    assert job.state == "failed"
    assert f"failed {MAX_REPLACEMENTS} times" in job.error["message"]
    assert launches.due_runs(platform, ("prepare",)) == []


def test_attempts_that_a_node_took_back_are_no_runs_of_their_evaluation_that_died(
    submitted: tuple[Platform, str, str], instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "FIRST_PAUSE", timedelta(0))
    platform, tenant, job_id = submitted
    with platform.engine.begin() as conn:
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == job_id).values(state="evaluating"))
    taken_back = Exit(exit_code=None, evidence=None, stop_reason=StopReason.PREEMPT)
    for _ in range(MAX_REPLACEMENTS):
        held = held_by(platform, tenant, job_id)
        status = WorkloadStatus(name=held.workload, phase=WorkloadPhase.EXITED, exit_code=0)
        attempts.finish(platform, held, evaluation_endings.judge(taken_back, status, cancelled=False, stalled=False))
    held_by(platform, tenant, job_id)
    for died in range(MAX_REPLACEMENTS):
        assert jobs.get(platform, tenant, job_id).job.state == "evaluating"
        (due,) = launches.due_runs(platform, ("evaluate",))
        assert due.run_key == f"{job_id}#evaluate{MAX_REPLACEMENTS + died}"
        create_run_for_test(instance, job_name="evaluate", tags={"dagster/ft_run_key": due.run_key}, status=dg.DagsterRunStatus.FAILURE)
        time.sleep(SETTLED.total_seconds() + 0.1)
        assert due.run_key in str(tick(failures, instance))
    job = jobs.get(platform, tenant, job_id).job
    assert (job.state, job.error["message"].partition(":")[0]) == ("failed", f"evaluate failed {MAX_REPLACEMENTS} times")


def test_an_operator_decides_on_the_bill_of_an_evaluation_that_is_given_up_with_its_result(
    submitted: tuple[Platform, str, str], instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "FIRST_PAUSE", timedelta(0))
    platform, tenant, job_id = submitted
    with platform.engine.begin() as conn:
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == job_id).values(state="evaluating"))
    held = held_by(platform, tenant, job_id)
    attempts.mark_started(platform, held, started_at=1000.0)
    attempts.finish(platform, held, ending())
    with platform.engine.begin() as conn:
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == job_id).values(evaluate_runs=MAX_REPLACEMENTS - 1))
    (due,) = launches.due_runs(platform, ("evaluate",))
    create_run_for_test(instance, job_name="evaluate", tags={"dagster/ft_run_key": due.run_key}, status=dg.DagsterRunStatus.FAILURE)
    time.sleep(SETTLED.total_seconds() + 0.1)
    assert due.run_key in str(tick(failures, instance))
    assert jobs.get(platform, tenant, job_id).job.state == "failed"
    (case,) = refunds.list_cases(platform, tenant=tenant).items
    assert (case.job_id, case.attempt, case.outcome) == (job_id, held.attempt, "evaluation_lost")


def last_run_failed(platform: Platform, instance: dg.DagsterInstance, held: Claim) -> str:
    """Makes the last run that the job may have for its training fail; returns the run's key."""
    with platform.engine.begin() as conn:
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == held.job_id).values(train_runs=MAX_REPLACEMENTS - 1))
    (due,) = launches.due_runs(platform, ("train",))
    create_run_for_test(instance, job_name="train", tags={"dagster/ft_run_key": due.run_key}, status=dg.DagsterRunStatus.FAILURE)
    return due.run_key


def test_a_training_that_is_given_up_costs_nothing_and_its_workload_is_stopped_after_its_bill(
    fresh_platform: Platform, write_chat_rows: Callable[..., Path], instance: dg.DagsterInstance
) -> None:
    held = start_job(fresh_platform, write_chat_rows)
    run_key = last_run_failed(fresh_platform, instance, held)

    class Ends(LocalLauncher):
        """Its workloads end as soon as they are asked to, and the worker that watches them sees it at once."""

        def stop(self, name: str, *, grace_s: float) -> WorkloadStatus:
            attempts.finish(fresh_platform, held, ending(failure("cancelled", Fault.USER, Retry.NEVER), seconds=7200.0))
            return WorkloadStatus(name=name, phase=WorkloadPhase.EXITED, exit_code=143)

    later = replace(fresh_platform, clock=lambda: fresh_platform.clock() + recovery.pause(MAX_REPLACEMENTS))
    assert run_key in str(recovery.replace_dead(later, instance, Ends(fresh_platform.settings.work_dir / "launcher")))
    assert jobs.get(fresh_platform, held.tenant, held.job_id).job.state == "failed"
    assert launches.due_runs(fresh_platform, ("train",)) == []
    entries = ledger(fresh_platform, held.job_id)
    assert [entry.kind for entry in entries] == ["refund", "usage"]
    assert sum(entry.amount_micros for entry in entries) == 0


def test_a_job_that_moves_on_while_dagster_is_asked_about_its_last_run_is_not_given_up(
    fresh_platform: Platform, write_chat_rows: Callable[..., Path], instance: dg.DagsterInstance
) -> None:
    held = start_job(fresh_platform, write_chat_rows)
    last_run_failed(fresh_platform, instance, held)
    looks = list[datetime]()

    def clock() -> datetime:  # asked for once for forgotten runs, and then for this one
        looks.append(fresh_platform.clock() + recovery.pause(MAX_REPLACEMENTS))
        if len(looks) == 2:
            attempts.finish(fresh_platform, held, ending())
        return looks[-1]

    launcher = LocalLauncher(fresh_platform.settings.work_dir / "launcher")
    assert recovery.replace_dead(replace(fresh_platform, clock=clock), instance, launcher) == []
    assert jobs.get(fresh_platform, held.tenant, held.job_id).job.state == "evaluating"


def test_a_run_that_ended_just_now_may_still_move_its_job(submitted: tuple[Platform, str, str], instance: dg.DagsterInstance) -> None:
    (due,) = launches.due_runs(submitted[0], ("prepare",))
    create_run_for_test(instance, job_name="prepare", tags={"dagster/ft_run_key": due.run_key}, status=dg.DagsterRunStatus.FAILURE)
    ended = instance.get_run_records(dg.RunsFilter(tags={"dagster/ft_run_key": due.run_key}))[0].update_timestamp
    assert why_gone(instance, due, None, ended + SETTLED) is None
    assert "ended FAILURE" in (why_gone(instance, due, None, ended + SETTLED + timedelta(milliseconds=1)) or "")


def test_a_stage_whose_runs_die_is_tried_again_after_ever_longer_pauses(
    submitted: tuple[Platform, str, str], instance: dg.DagsterInstance
) -> None:
    platform = submitted[0]
    pauses = []
    for _ in range(MAX_REPLACEMENTS):
        (due,) = launches.due_runs(platform, ("prepare",))
        create_run_for_test(instance, job_name="prepare", tags={"dagster/ft_run_key": due.run_key}, status=dg.DagsterRunStatus.FAILURE)
        ended = instance.get_run_records(dg.RunsFilter(tags={"dagster/ft_run_key": due.run_key}))[0].update_timestamp
        later = [s for s in (0, 5, 15, 45, 135, 400) if why_gone(instance, due, None, ended + timedelta(seconds=s))]
        pauses.append(later[0])
        assert launches.replace_run(platform, due)
    assert pauses == [5, 15, 45, 135, 400]


def test_a_run_that_never_entered_the_queue_is_lost_unless_another_of_its_key_did(
    submitted: tuple[Platform, str, str], instance: dg.DagsterInstance
) -> None:
    (due,) = launches.due_runs(submitted[0], ("prepare",))
    tags = {"dagster/ft_run_key": due.run_key}
    create_run_for_test(instance, job_name="prepare", tags=tags)
    made = instance.get_run_records(dg.RunsFilter(tags=tags))[0].update_timestamp
    assert why_gone(instance, due, None, made + UNQUEUED) is None
    starting = create_run_for_test(instance, job_name="prepare", tags=tags, status=dg.DagsterRunStatus.STARTING)
    create_run_for_test(instance, job_name="prepare", tags=tags)
    assert why_gone(instance, due, None, made + timedelta(minutes=5)) is None, "one has left the queue"
    instance.delete_run(starting.run_id)
    assert "never entered the queue" in (why_gone(instance, due, None, made + timedelta(minutes=5)) or "")


def test_a_worker_that_hangs_has_ended_before_its_run_is_replaced(submitted: tuple[Platform, str, str]) -> None:
    platform, _, _ = submitted
    (due,) = launches.due_runs(platform, ("prepare",))
    launcher = {"module": "resources.dagster.run_launcher", "class": "ForkingRunLauncher"}
    tags = {"dagster/ft_run_key": due.run_key}
    with instance_for_test(overrides={"run_launcher": launcher}) as instance, subprocess.Popen(["sleep", "300"]) as worker:
        try:
            run = create_run_for_test(instance, job_name="prepare", tags=tags, status=dg.DagsterRunStatus.STARTED)
            record = record_path(runs_dir(platform.settings), run.run_id)
            record.parent.mkdir(exist_ok=True)
            record.write_text(json.dumps({"pid": worker.pid, "identity": identity(worker.pid)}))
            began = instance.get_run_records(dg.RunsFilter(tags=tags))[0].update_timestamp
            assert why_gone(instance, due, None, began + HUNG) is None, "its database may be away"
            assert worker.poll() is None
            assert "was silent" in (why_gone(instance, due, None, began + HUNG + timedelta(seconds=1)) or "")
            assert worker.wait(60) == -signal.SIGKILL, "two workers would follow one attempt"
        finally:
            worker.kill()
