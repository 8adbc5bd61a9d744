"""Dagster's own queue daemon, over a real instance with the project's ``dagster.yaml``: what it starts and what it holds back."""

from __future__ import annotations

import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import sqlalchemy as sa
from dagster._core.instance.ref import InstanceRef
from dagster._core.remote_origin import GrpcServerCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin
from dagster._core.run_coordinator import SubmitRunContext
from dagster._core.test_utils import create_run_for_test, create_test_daemon_workspace_context
from dagster._core.workspace.load_target import EmptyWorkspaceTarget
from dagster._daemon.run_coordinator import QueuedRunCoordinatorDaemon

from control_plane.platform.context import Platform
from resources.database import embedded
from resources.database.engine import make_engine
from tests.sensors.test_run_coordinator import grant
from tests.support.jobs.queued_jobs import Queued

ROOT = Path(__file__).resolve().parents[3]
LOCATION = GrpcServerCodeLocationOrigin(host="127.0.0.1", port=9, location_name="ft")
"""Where queued runs come from; nothing asks it for anything."""
RECORDS = {"run_launcher": {"module": "dagster._core.test_utils", "class": "MockedRunLauncher", "config": {}}}
"""Dagster's launcher for tests of its queue: a run that leaves the queue stays in STARTING."""


@dataclass
class RunQueue:
    """Tenants' jobs on one side, Dagster's instance and its daemon on the other."""

    instance: dg.DagsterInstance
    jobs: Queued
    stage_of: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By run: stage and tenant."""

    def submit(self, stage: str, tenant: str, count: int = 1) -> None:
        """Queue runs of new jobs of `tenant`, which are in the state that the stage asks for."""
        for _ in range(count):
            job = self.jobs.job(tenant)
            if stage == "train":
                grant(self.jobs.platform, job, 1)
            else:
                state = {"prepare": "validating", "evaluate": "evaluating", "reevaluate": "succeeded"}[stage]
                self.jobs.set(job, state=state)
            run = self.queued(stage, tags={"dagster/partition": f"{tenant}:{job}", "ft/tenant": tenant})
            assert run.status is dg.DagsterRunStatus.QUEUED
            self.stage_of[run.run_id] = (stage, tenant)

    def queued(self, job_name: str, **fields: Any) -> dg.DagsterRun:
        """A run as it enters the queue."""
        origin = RemoteJobOrigin(RemoteRepositoryOrigin(LOCATION, "__repository__"), job_name)
        run = create_run_for_test(self.instance, job_name=job_name, remote_job_origin=origin, **fields)
        return self.instance.run_coordinator.submit_run(SubmitRunContext(run, workspace=None))  # type: ignore[arg-type]

    def training(self, tenant: str, count: int) -> None:
        """Training runs of `tenant` that are under way."""
        for n in range(count):
            tags = {"ft/tenant": tenant, "dagster/partition": f"{tenant}:ftjob-{n}"}
            create_run_for_test(self.instance, job_name="train", status=dg.DagsterRunStatus.STARTED, tags=tags)

    def dequeue(self) -> Counter[tuple[str, str]]:
        """One look of the daemon at its queue: by stage and tenant, the runs that it starts."""
        before = self.in_status(dg.DagsterRunStatus.STARTING)
        workspace = create_test_daemon_workspace_context(EmptyWorkspaceTarget(), self.instance)
        with workspace as context, QueuedRunCoordinatorDaemon(interval_seconds=1) as daemon:
            list(daemon.run_iteration(context))
        return Counter(self.stage_of[run_id] for run_id in self.in_status(dg.DagsterRunStatus.STARTING) - before)

    def end(self, stage: str, tenant: str) -> None:
        """One of the runs that were started ends."""
        starting = self.in_status(dg.DagsterRunStatus.STARTING)
        run = self.instance.get_run_by_id(next(r for r in starting if self.stage_of[r] == (stage, tenant)))
        assert run is not None
        self.instance.report_run_canceled(run)

    def in_status(self, status: dg.DagsterRunStatus) -> set[str]:
        return {run.run_id for run in self.instance.get_runs(dg.RunsFilter(statuses=[status]))}


@pytest.fixture
def queue(
    fresh_platform: Platform, postgres_dir: Path, write_chat_rows: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[RunQueue]:
    database = f"d_{uuid.uuid4().hex[:12]}"
    admin = make_engine(embedded.socket_url(postgres_dir, "postgres")).execution_options(isolation_level="AUTOCOMMIT")
    with admin.connect() as conn:
        conn.execute(sa.text(f"CREATE DATABASE {database}"))
    admin.dispose()
    shutil.copy(ROOT / "dagster.yaml", tmp_path / "dagster.yaml")
    monkeypatch.setenv("DAGSTER_POSTGRES_URL", embedded.socket_url(postgres_dir, database))
    monkeypatch.setenv("FT_DATABASE_URL", fresh_platform.engine.url.render_as_string(hide_password=False))
    monkeypatch.setenv("FT_HOME", str(fresh_platform.settings.home))
    with dg.DagsterInstance.from_ref(InstanceRef.from_dir(str(tmp_path), overrides=RECORDS)) as instance:
        yield RunQueue(instance, Queued(platform=fresh_platform, write_rows=write_chat_rows))


def test_with_40_trainings_active_a_reserved_job_starts_and_data_is_prepared_and_evaluated(queue: RunQueue) -> None:
    busy, other = queue.jobs.tenant(), queue.jobs.tenant()
    queue.training(busy, 40)
    queue.submit("prepare", busy, 3)
    queue.submit("evaluate", busy, 2)
    queue.submit("prepare", other)
    queue.submit("evaluate", other)
    queue.submit("train", busy)
    expected = {("train", busy): 1, ("prepare", busy): 2, ("prepare", other): 1, ("evaluate", busy): 2, ("evaluate", other): 1}
    assert queue.dequeue() == expected


def test_a_job_with_a_reservation_starts_while_every_slot_is_taken(queue: RunQueue) -> None:
    tenants = [queue.jobs.tenant() for _ in range(3)]
    for tenant in tenants:
        queue.submit("prepare", tenant, 2)
        queue.submit("evaluate", tenant)
    started = queue.dequeue()
    assert Counter(stage for stage, _ in started.elements()) == {"prepare": 4, "evaluate": 3}
    for tenant in tenants:
        queue.submit("train", tenant, 2)
    assert queue.dequeue() == {("train", tenant): 2 for tenant in tenants}


def test_one_tenant_leaves_half_of_the_slots_to_others_and_a_free_one_goes_to_the_next(queue: RunQueue) -> None:
    first, second = queue.jobs.tenant(), queue.jobs.tenant()
    queue.submit("prepare", first, 4)
    assert queue.dequeue() == {("prepare", first): 2}
    queue.submit("prepare", second, 3)
    assert queue.dequeue() == {("prepare", second): 2}
    assert queue.dequeue() == {}
    queue.end("prepare", second)
    assert queue.dequeue() == {("prepare", second): 1}


def test_evaluations_take_no_slot_because_they_hold_reservations(queue: RunQueue) -> None:
    tenant = queue.jobs.tenant()
    queue.submit("evaluate", tenant, 5)
    queue.submit("reevaluate", tenant, 5)
    assert queue.dequeue() == {("evaluate", tenant): 5, ("reevaluate", tenant): 5}


def test_the_limits_follow_the_settings(queue: RunQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_PREPARE_RUNS", "6")
    tenant = queue.jobs.tenant()
    queue.submit("prepare", tenant, 5)
    assert queue.dequeue() == {("prepare", tenant): 3}


def test_a_run_by_hand_takes_its_slot_too(queue: RunQueue) -> None:
    tenant = queue.jobs.tenant()
    job = queue.jobs.job(tenant)
    by_hand = {"dagster/partition": f"{tenant}:{job}"}
    queued = queue.queued("__ASSET_JOB", asset_selection=frozenset({dg.AssetKey("tokenized_pack")}), tags=by_hand)
    assert {name: value for name, value in queued.tags.items() if "slot" in name} == {"dagster/ft_prepare_slot": tenant}


@pytest.mark.parametrize("stage", ["train", "evaluate", "greet"])
def test_a_run_with_the_tag_of_a_slot_that_it_does_not_take_is_refused(queue: RunQueue, stage: str) -> None:
    tenant, other = queue.jobs.tenant(), queue.jobs.tenant()
    job = queue.jobs.job(tenant)
    grant(queue.jobs.platform, job, 1)
    forged = queue.queued(stage, tags={"dagster/partition": f"{tenant}:{job}", "dagster/ft_prepare_slot": other})
    assert forged.status is dg.DagsterRunStatus.CANCELED
    queue.submit("prepare", other, 1)
    assert queue.dequeue() == {("prepare", other): 1}


def test_a_forged_tenant_of_a_slot_is_overwritten(queue: RunQueue) -> None:
    tenant = queue.jobs.tenant()
    job = queue.jobs.job(tenant)
    queue.jobs.set(job, state="validating")
    run = queue.queued("prepare", tags={"dagster/partition": f"{tenant}:{job}", "dagster/ft_prepare_slot": "another"})
    assert {name: value for name, value in run.tags.items() if "slot" in name} == {"dagster/ft_prepare_slot": tenant}


def test_a_key_that_serves_nothing_is_taken_off(queue: RunQueue) -> None:
    run = queue.queued("greet", tags={"dagster/ft_run_key": "ftjob-1#train0"})
    assert (run.status, run.tags["dagster/ft_run_key"], run.tags["dagster/ft_refused_run_key"]) == (
        dg.DagsterRunStatus.QUEUED,
        "",
        "ftjob-1#train0",
    )
