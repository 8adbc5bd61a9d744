"""Runs that are forked: real children of a real server, over a real Dagster instance, killed at will."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import psutil
import pytest
import sqlalchemy as sa
from dagster._core.code_pointer import ModuleCodePointer
from dagster._core.definitions.reconstruct import ReconstructableRepository
from dagster._core.instance.ref import InstanceRef
from dagster._core.launcher import LaunchRunContext, WorkerStatus

from control_plane.composition import open_platform
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.platform.context import Platform
from control_plane.platform.settings import load
from control_plane.queue.launches import due_runs
from control_plane.tenants import service as tenants
from ft_assets.platform_resource import PlatformResource
from resources.dagster.run_launcher import ForkingRunLauncher
from resources.dagster.run_records import ready_file
from resources.dagster.run_server import read_record, runs_dir
from resources.database import embedded
from resources.database.engine import make_engine
from sensors.recovery import failures
from tests.support.models.tiny_model import build_tiny_model

ROOT = Path(__file__).resolve().parents[3]
NOTICED_S = 30.0
"""What a lost worker may take to be noticed."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass(kw_only=True)
class World:
    platform: Platform
    instance: dg.DagsterInstance
    env: dict[str, str]
    tenant: str
    file: str
    server: subprocess.Popen[bytes] | None = None
    submitted: int = 0

    @property
    def launcher(self) -> ForkingRunLauncher:
        assert isinstance(self.instance.run_launcher, ForkingRunLauncher)
        return self.instance.run_launcher

    def serve(self) -> None:
        ready = ready_file(self.platform.settings)
        ready.unlink(missing_ok=True)
        log = (self.platform.settings.home / "runs.log").open("ab")
        with log:
            command = [sys.executable, "-m", "resources.dagster.run_server"]
            self.server = subprocess.Popen(command, env=self.env, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        until(ready.exists, 120)

    def prepare(self) -> tuple[str, dg.DagsterRun]:
        """Launch the preparation of a new job; its id and the run."""
        self.submitted += 1
        body = {"model": "tiny-real", "training_file": self.file, "seed": self.submitted}
        job_id = str(jobs.submit(self.platform, self.tenant, JobRequest.from_body(body)).job.id)
        return job_id, self.launch(job_id)

    def launch(self, job_id: str) -> dg.DagsterRun:
        (due,) = [d for d in due_runs(self.platform, ("prepare",)) if d.job_id == job_id]
        key = f"{self.tenant}:{job_id}"
        self.instance.add_dynamic_partitions("jobs", [key])
        repository = ReconstructableRepository(ModuleCodePointer("ft_assets.definitions", "defs", str(ROOT)))
        job = repository.get_reconstructable_job("prepare")
        run = self.instance.create_run_for_job(
            job.get_definition(),
            tags={"dagster/partition": key, "dagster/ft_run_key": due.run_key},
            job_code_origin=job.get_python_origin(),
        )
        self.launcher.launch_run(LaunchRunContext(dagster_run=run, workspace=None))
        return run

    def worker(self, run: dg.DagsterRun) -> int:
        pid = self.launcher.worker(run)
        assert pid is not None
        return pid

    def status(self, run: dg.DagsterRun) -> dg.DagsterRunStatus:
        found = self.instance.get_run_by_id(run.run_id)
        assert found is not None
        return found.status

    @contextlib.contextmanager
    def stuck(self, job_id: str) -> Iterator[None]:
        """Nobody can write the job's row: its run waits for it."""
        with self.platform.engine.begin() as conn:
            conn.execute(sa.select(jobs_table.c.id).where(jobs_table.c.id == job_id).with_for_update())
            yield

    def tick(self) -> str:
        with dg.build_sensor_context(instance=self.instance, resources={"platform": PlatformResource()}) as context:
            return str(failures(context))


def until(true: Callable[[], bool], timeout_s: float) -> float:
    """Wait until it is; the seconds that took."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < timeout_s, f"not seen in {timeout_s} s"
        time.sleep(0.05)
    return time.monotonic() - began


@pytest.fixture(scope="module")
def dagster_url(postgres_dir: Path) -> str:
    """A database for Dagster alone."""
    name = f"d_{uuid.uuid4().hex[:12]}"
    admin = make_engine(embedded.socket_url(postgres_dir, "postgres")).execution_options(isolation_level="AUTOCOMMIT")
    with admin.connect() as conn:
        conn.execute(sa.text(f"CREATE DATABASE {name}"))
    admin.dispose()
    return embedded.socket_url(postgres_dir, name)


@pytest.fixture(scope="module")
def world(new_platform: Callable[..., Platform], dagster_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    bare = new_platform()
    home = bare.settings.home
    (home / "dagster").mkdir(parents=True)
    shutil.copy(ROOT / "dagster.yaml", home / "dagster" / "dagster.yaml")
    catalogue = home / "models.yaml"
    model = build_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
    catalogue.write_text(f"models: [{{id: tiny-real, path: {model}, license: Apache-2.0}}]")
    told = {
        "FT_DATABASE_URL": bare.engine.url.render_as_string(hide_password=False), "FT_HOME": str(home), "FT_MLFLOW_URI": "off",
        "FT_OBJECT_STORE": bare.settings.object_store, "FT_BASE_MODELS": str(catalogue), "FT_INFERENCE_URLS": ",",
        "DAGSTER_HOME": str(home / "dagster"), "DAGSTER_POSTGRES_URL": dagster_url, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patched:
        for name, value in told.items():
            patched.setenv(name, value)
        platform = open_platform(load())
        owner, _ = tenants.create(platform, f"t-{uuid.uuid4().hex[:8]}", tier="premium")
        rows = home / "rows.jsonl"
        turns = '{{"messages": [{{"role": "user", "content": "What is {0}?"}}, {{"role": "assistant", "content": "It is {0}."}}]}}\n'
        rows.write_text("".join(turns.format(n) for n in range(150)))
        with rows.open("rb") as f:
            file = uploaded_files.create(platform, owner.id, f, filename="rows.jsonl", purpose="fine-tune")
        with dg.DagsterInstance.from_ref(InstanceRef.from_dir(str(home / "dagster"))) as instance:
            made = World(platform=platform, instance=instance, env={**os.environ, **told}, tenant=owner.id, file=file.id)
            made.serve()
            yield made
            assert made.server is not None
            made.server.terminate()
            made.server.wait(20)


def test_a_run_is_a_child_of_the_server_and_moves_its_job(world: World) -> None:
    job_id, run = world.prepare()
    assert world.server is not None
    assert psutil.Process(world.worker(run)).ppid() == world.server.pid
    until(lambda: world.status(run) is dg.DagsterRunStatus.SUCCESS, 60)
    until(lambda: jobs.get(world.platform, world.tenant, job_id).job.state == "queued", 10)
    until(lambda: read_record(runs_dir(world.platform.settings), run.run_id) is None, 10)
    assert world.launcher.check_run_worker_health(run).status is WorkerStatus.NOT_FOUND


def test_a_run_whose_process_is_killed_has_failed_a_moment_later_and_is_replaced(world: World) -> None:
    job_id, run = world.prepare()
    with world.stuck(job_id):
        until(lambda: world.status(run) is dg.DagsterRunStatus.STARTED, 30)
        os.kill(world.worker(run), signal.SIGKILL)
        assert until(lambda: world.status(run) is dg.DagsterRunStatus.FAILURE, NOTICED_S) < NOTICED_S / 2
    until(lambda: f"{job_id}#prepare0" in world.tick(), 10)
    (due,) = [d for d in due_runs(world.platform, ("prepare",)) if d.job_id == job_id]
    assert due.run_key == f"{job_id}#prepare1"
    again = world.launch(job_id)
    until(lambda: world.status(again) is dg.DagsterRunStatus.SUCCESS, 60)


def test_runs_outlive_a_server_that_is_killed_and_a_worker_lost_then_is_noticed_all_the_same(world: World) -> None:
    job_id, run = world.prepare()
    with world.stuck(job_id):
        until(lambda: world.status(run) is dg.DagsterRunStatus.STARTED, 30)
        pid = world.worker(run)
        assert world.server is not None
        world.server.kill()
        world.server.wait()
        assert world.launcher.check_run_worker_health(run).status is WorkerStatus.RUNNING
        os.kill(pid, signal.SIGKILL)
    until(lambda: "lost its process" in world.tick(), NOTICED_S)
    assert world.status(run) is dg.DagsterRunStatus.FAILURE
    world.serve()
    again = world.launch(job_id)
    until(lambda: world.status(again) is dg.DagsterRunStatus.SUCCESS, 60)


def test_a_run_that_is_cancelled_ends_as_cancelled(world: World) -> None:
    job_id, run = world.prepare()
    with world.stuck(job_id):
        until(lambda: world.status(run) is dg.DagsterRunStatus.STARTED, 30)
        assert world.launcher.terminate(run.run_id)
        assert world.status(run) is dg.DagsterRunStatus.CANCELING
    until(lambda: world.status(run) is dg.DagsterRunStatus.CANCELED, 30)
