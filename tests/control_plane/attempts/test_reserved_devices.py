"""Reserved GPUs reach the processes that train on them; others are kept away from those."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from agent.workload import Workload
from control_plane.api.app import create_app
from control_plane.datasets.uploads import uploaded_files
from control_plane.evaluations import follow_evaluation
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.platform.context import Platform
from control_plane.platform.protocols import WorkloadStatus
from control_plane.queue import cycle, reservations
from ft_assets.base_models import Catalogue
from ft_assets.durable_files import write_json
from ft_assets.errors import InvalidRequest
from ft_assets.evals import step
from ft_assets.evals.run.run_file import EXIT_BAD_INPUT, HEARTBEAT_NAME, EvalRun
from tests.control_plane.evaluations.test_follow_evaluation import Scripted as ScriptedEvaluation
from tests.control_plane.evaluations.test_follow_evaluation import Seen, finish
from tests.ft_assets.datasets.step.test_packing_builders import model  # noqa: F401 - fixture
from tests.support.jobs.evaluated_jobs import evaluating_job
from tests.support.jobs.followed_jobs import Job, Scripted, store_pack, until
from tests.support.jobs.queued_jobs import Queued
from tests.support.jobs.training_specs import SPEC
from tests.support.processes.scripted_evaluation import GO
from tests.support.processes.scripted_training import Scenario
from tests.support.servers.served_app import served


class Machine:
    """A machine with four slots, whose jobs train until the test lets them go on."""

    def __init__(self, platform: Platform, write_rows: Callable[..., Path]) -> None:
        self._serving = ExitStack()
        url = self._serving.enter_context(served(create_app(platform)))
        self.platform = platform = replace(platform, settings=replace(platform.settings, internal_url=url))
        self.queue = Queued(platform=platform, write_rows=write_rows)
        self.tenant = self.queue.tenant()
        self.launcher = Scripted(platform.settings.work_dir / "launcher")
        self.evaluations = ScriptedEvaluation(platform.settings.work_dir / "launcher")
        self.threads: list[threading.Thread] = []
        store_pack(platform, self.tenant, SPEC.pack_fingerprint)

    def train(self, *, gpus: int) -> Job:
        """A job whose process runs and holds its GPUs."""
        job = Job(self.platform, self.tenant, self.queue.job(self.tenant, gpus=gpus), self.launcher)
        spec = replace(SPEC, base_digest=self.platform.models.get("tiny-base").digest)
        self.queue.set(job.id, spec=spec.to_dict())
        self.threads.append(job.following(Scenario(hold_at=1))[1])
        until((job.work_dir / "metrics.jsonl").exists)
        return job

    def evaluate(self, name: str) -> Path:
        """Directory of an evaluation whose process runs."""
        out_dir = self.platform.settings.home / name
        out_dir.mkdir()
        run = EvalRun(base_model_dir=out_dir, adapter_dir=None, digests={"base": "b"}, lease=out_dir / "lease", out_dir=out_dir)
        following = threading.Thread(target=lambda: follow_evaluation.follow(self.evaluations, run, name=name, watch=Seen()), daemon=True)
        following.start()
        self.threads.append(following)
        until((out_dir / HEARTBEAT_NAME).exists)
        return out_dir

    def end(self) -> None:
        for path in self.platform.settings.work_dir.glob("jobs/*"):
            (path / "go").touch()
        for path in self.platform.settings.home.glob("e-*"):
            finish(EvalRun(base_model_dir=path, adapter_dir=None, digests={}, lease=None, out_dir=path))
        for thread in self.threads:
            thread.join(timeout=30)
        for workload in self.launcher.names:
            self.launcher.stop(workload, grace_s=0.1)
        self._serving.close()


def visible(directory: Path) -> str:
    """``CUDA_VISIBLE_DEVICES`` as the process found it."""
    return (directory / "visible_devices").read_text()


@pytest.fixture
def machine(
    new_platform: Callable[..., Platform], write_chat_rows: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Machine]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,8")
    made = Machine(new_platform(local_gpus="4"), write_chat_rows)
    yield made
    made.end()


def test_jobs_train_on_the_gpus_that_they_reserved_and_evaluations_elsewhere(machine: Machine) -> None:
    first, second, pair = machine.train(gpus=1), machine.train(gpus=1), machine.train(gpus=2)
    assert [visible(job.work_dir) for job in (first, second, pair)] == ["4", "5", "6,7"]
    assert reservations.held_devices(machine.platform) == (0, 1, 2, 3)
    assert visible(machine.evaluate("e-1")) == "8", "the GPU that no reservation holds"
    assert visible(machine.evaluate("e-2")) == "8", "every GPU has one user: nothing is gained by sitting on a training"


def test_a_gpu_that_is_given_back_is_reserved_again(machine: Machine) -> None:
    first, second = machine.train(gpus=1), machine.train(gpus=1)
    (first.work_dir / "go").touch()
    machine.threads[0].join(timeout=30)
    cycle.release(machine.platform, first.id, 1)
    third = machine.train(gpus=2)
    assert [visible(job.work_dir) for job in (first, second, third)] == ["4", "5", "4,6"]


def test_evaluations_take_different_gpus_while_some_are_free(machine: Machine) -> None:
    machine.train(gpus=1)
    assert [visible(machine.evaluate(f"e-{n}")) for n in range(4)] == ["8", "7", "6", "5"]


class Refusing(ScriptedEvaluation):
    """Its evaluations end as soon as they have started, because of their input."""

    def start_or_adopt(self, workload: Workload, *, token: str = "") -> WorkloadStatus:
        write_json(Path(workload.command[-1]).parent / GO, EXIT_BAD_INPUT)
        return super().start_or_adopt(workload, token=token)


def test_the_evaluation_of_a_job_keeps_away_from_reserved_gpus(
    machine: Machine,
    model: Path,  # noqa: F811
    write_chat_rows: Callable[..., Path],
) -> None:
    entry = {"id": "tiny-base", "path": str(model), "license": "Apache-2.0"}
    platform = replace(machine.platform, models=Catalogue({"tiny-base": (entry, model)}))
    job = evaluating_job(platform, machine.tenant, write_chat_rows())
    machine.train(gpus=4)
    assert visible(machine.evaluate("e-1")) == "8"
    with pytest.raises(InvalidRequest, match="refused"):
        step.evaluate(platform, Refusing(platform.settings.work_dir / "launcher"), machine.tenant, job)
    (out_dir,) = (platform.settings.job_dir(job) / "evals").iterdir()
    assert visible(out_dir) == "8", "it shares the GPU of another evaluation rather than that of a training"


@pytest.mark.parametrize("pools", [None, "pools: [{name: local, gpu_type: local, nodes: [{count: 1, gpus: 4}]}]"], ids=["embedded", "file"])
def test_slots_may_share_a_gpu_and_the_ranks_of_a_job_may_not(
    new_platform: Callable[..., Platform],
    write_chat_rows: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pools: str | None,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    (tmp_path / "pools.yaml").write_text(pools or "")
    machine = Machine(new_platform(**({"pools": str(tmp_path / "pools.yaml")} if pools else {"local_gpus": "4"})), write_chat_rows)
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


def test_a_machine_without_gpus_shows_none(
    new_platform: Callable[..., Platform], write_chat_rows: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    machine = Machine(new_platform(local_gpus="2"), write_chat_rows)
    try:
        assert visible(machine.train(gpus=1).work_dir) == ""
        assert visible(machine.evaluate("e-1")) == ""
    finally:
        machine.end()


def test_nodes_that_one_machine_stands_for_have_gpus_of_their_own(new_platform: Callable[..., Platform], tmp_path: Path) -> None:
    pools = tmp_path / "pools.yaml"
    pools.write_text("pools: [{name: local, gpu_type: local, nodes: [{count: 2, gpus: 2}]}]")
    platform = new_platform(pools=str(pools))
    shares = reservations.local_placement(platform, [["local-0", 1], ["local-1", 2]], [[1], [0, 1]])
    assert [(share.node, share.devices) for share in shares] == [("local-0", (1,)), ("local-1", (2, 3))]
