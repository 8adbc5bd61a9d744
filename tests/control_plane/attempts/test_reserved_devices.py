"""Reserved GPUs reach the processes that train on them; others are kept away from those."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from control_plane.api.app import create_app
from control_plane.attempts.watch import Watcher
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.platform.context import Platform
from control_plane.queue import cycle, reservations
from control_plane.queue.tables import held_devices
from core.base_models import Catalogue
from core.errors import InvalidRequest, NotAdmitted
from ft_assets.evals import step
from tests.ft_assets.datasets.step.test_packing_builders import model  # noqa: F401 - fixture
from tests.support.jobs.evaluated_jobs import evaluating_job
from tests.support.jobs.followed_jobs import Job, Scripted, store_pack, until
from tests.support.jobs.queued_jobs import Queued
from tests.support.jobs.training_specs import SPEC
from tests.support.processes.scripted_training import Scenario
from tests.support.servers.served_app import served


class Machine:
    """A machine with four slots, whose jobs train until the test lets them go on."""

    def __init__(self, platform: Platform, write_rows: Callable[..., Path], base: Path) -> None:
        self._serving = ExitStack()
        platform = replace(platform, models=Catalogue({"tiny-base": ({"id": "tiny-base", "path": str(base), "license": "MIT"}, base)}))
        url = self._serving.enter_context(served(create_app(platform)))
        self.platform = platform = replace(platform, settings=replace(platform.settings, internal_url=url))
        self.queue = Queued(platform=platform, write_rows=write_rows)
        self.tenant = self.queue.tenant()
        self.launcher = Scripted(platform.settings.work_dir / "launcher")
        self.evaluated = 0
        self.threads: list[threading.Thread] = []
        self.evaluating: list[threading.Thread] = []
        store_pack(platform, self.tenant, SPEC.pack_fingerprint)

    def train(self, *, gpus: int) -> Job:
        """A job whose process runs and holds its GPUs."""
        job = Job(self.platform, self.tenant, self.queue.job(self.tenant, gpus=gpus), self.launcher)
        spec = replace(SPEC, base_digest=self.platform.models.get("tiny-base").digest)
        self.queue.set(job.id, spec=spec.to_dict())
        self.threads.append(job.following(Scenario(hold_at=1))[1])
        until((job.work_dir / "metrics.jsonl").exists)
        return job

    def evaluate(self) -> Path:
        """Directory of a job whose evaluation runs and holds its GPU."""
        self.evaluated += 1
        job_id = evaluating_job(self.platform, self.tenant, self.queue.write_rows(), seed=self.evaluated)
        cycle.run_cycle(self.platform)
        following = threading.Thread(target=lambda: step.evaluate(self.platform, self.launcher, self.tenant, job_id), daemon=True)
        following.start()
        self.evaluating.append(following)
        directory = self.platform.settings.job_dir(job_id)
        until((directory / "visible_devices").exists)
        return directory

    def end(self) -> None:
        for path in self.platform.settings.work_dir.glob("jobs/*"):
            (path / "go").touch()
        for thread in self.threads:
            thread.join(timeout=30)
        with contextlib.closing(Watcher(platform=self.platform, launcher=self.launcher, answers=lambda: True)) as watcher:
            until(lambda: watcher.look() is not None and not any(thread.is_alive() for thread in self.evaluating))
            watcher.settle()
        for workload in self.launcher.names:
            self.launcher.stop(workload, grace_s=0.1)
        self._serving.close()


def visible(directory: Path) -> str:
    """``CUDA_VISIBLE_DEVICES`` as the process found it."""
    return (directory / "visible_devices").read_text()


@pytest.fixture
def machine(
    new_platform: Callable[..., Platform],
    write_chat_rows: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    model: Path,  # noqa: F811
) -> Iterator[Machine]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,8")
    made = Machine(new_platform(local_gpus="4"), write_chat_rows, model)
    yield made
    made.end()


def test_jobs_train_and_are_evaluated_on_the_gpus_that_they_reserved(machine: Machine) -> None:
    first, evaluated, second = machine.train(gpus=1).work_dir, machine.evaluate(), machine.train(gpus=1).work_dir
    assert [visible(directory) for directory in (first, evaluated, second)] == ["4", "5", "6"]
    with machine.platform.engine.connect() as conn:
        assert sorted(conn.execute(sa.select(held_devices.c.number)).scalars()) == [0, 1, 2]


@pytest.mark.slow
def test_a_gpu_that_is_given_back_is_reserved_again(machine: Machine) -> None:
    first, second = machine.train(gpus=1), machine.train(gpus=1)
    (first.work_dir / "go").touch()
    machine.threads[0].join(timeout=30)
    cycle.release(machine.platform, first.id, 1)
    third = machine.train(gpus=2)
    assert [visible(job.work_dir) for job in (first, second, third)] == ["4", "5", "4,6"]


@pytest.mark.slow
def test_evaluations_take_different_gpus_and_wait_while_none_is_free(machine: Machine) -> None:
    machine.train(gpus=2)
    assert [visible(machine.evaluate()) for _ in range(2)] == ["6", "7"]
    waits = evaluating_job(machine.platform, machine.tenant, machine.queue.write_rows(), seed=9)
    assert all(decision.job_id != waits for decision in cycle.run_cycle(machine.platform))
    with pytest.raises(NotAdmitted, match="holds no reservation for this evaluation"):
        step.evaluate(machine.platform, machine.launcher, machine.tenant, waits)


@pytest.mark.parametrize(
    "pools",
    [
        pytest.param(None, id="embedded"),
        pytest.param("pools: [{name: local, gpu_type: local, nodes: [{count: 1, gpus: 4}]}]", id="file", marks=pytest.mark.slow),
    ],
)
def test_slots_may_share_a_gpu_and_the_ranks_of_a_job_may_not(
    new_platform: Callable[..., Platform],
    write_chat_rows: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: Path,  # noqa: F811
    pools: str | None,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    (tmp_path / "pools.yaml").write_text(pools or "")
    machine = Machine(new_platform(**({"pools": str(tmp_path / "pools.yaml")} if pools else {"local_gpus": "4"})), write_chat_rows, model)
    try:
        alone, pair, third = machine.train(gpus=1), machine.train(gpus=2), machine.train(gpus=1)
        assert [visible(job.work_dir) for job in (alone, pair, third)] == ["4", "4,5", "5"]
        with write_chat_rows().open("rb") as rows:
            file = uploaded_files.create(machine.platform, machine.tenant, rows, filename="rows.jsonl", purpose="fine-tune")
        body = {"model": "tiny-base", "training_file": file.id, "hardware": {"num_gpus": 4}}
        with pytest.raises(InvalidRequest, match="4 exceeds the 2 that pool local gives to a job") as refused:
            jobs.submit(machine.platform, machine.tenant, JobRequest.from_body(body))
        assert refused.value.code == "invalid_hardware"
    finally:
        machine.end()


@pytest.mark.slow
def test_a_machine_without_gpus_shows_none(
    new_platform: Callable[..., Platform],
    write_chat_rows: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    model: Path,  # noqa: F811
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    machine = Machine(new_platform(local_gpus="2"), write_chat_rows, model)
    try:
        assert visible(machine.train(gpus=1).work_dir) == ""
        assert visible(machine.evaluate()) == ""
    finally:
        machine.end()


def test_nodes_that_one_machine_stands_for_have_gpus_of_their_own(new_platform: Callable[..., Platform], tmp_path: Path) -> None:
    pools = tmp_path / "pools.yaml"
    pools.write_text("pools: [{name: local, gpu_type: local, nodes: [{count: 2, gpus: 2}]}]")
    platform = new_platform(pools=str(pools))
    shares = reservations.local_placement(platform, [["local-0", 1], ["local-1", 2]], [[1], [0, 1]])
    assert [(share.node, share.devices) for share in shares] == [("local-0", (1,)), ("local-1", (2, 3))]
