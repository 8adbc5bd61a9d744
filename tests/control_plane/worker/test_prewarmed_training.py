"""Real trainings in a prewarmed process: the bytes, the environment and the end of a cold start, and never a second training."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch", reason="needs the training environment")

from agent.prewarmed_trainer import NAME
from control_plane.attempts import service as attempts
from control_plane.attempts.claims import Ending
from control_plane.attempts.tables import attempts as attempts_table
from control_plane.platform.job_states import JobState
from control_plane.platform.protocols import WorkloadStatus
from control_plane.platform.transfer import upload
from core import layout
from core.base_models import Catalogue
from core.workload import Workload
from engine.training.spec import CheckpointPolicy
from resources.launcher import LocalGangs, prewarmed
from resources.launcher.local_processes import workload_environment
from resources.launcher.process_identity import alive
from tests.engine.training.attempts import SPEC, write_pack
from tests.support.jobs.followed_jobs import Job, Scripted, until
from tests.support.models.tiny_model import build_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Prewarming(Scripted):
    """The launcher of a local stack, with real agents and trainers."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.real = LocalGangs(root, prewarms=True)

    def start_or_adopt(self, workload: Workload, *, token: str = "") -> WorkloadStatus:
        self.names.append(workload.name)
        return self.real.start_or_adopt(workload, token=token)

    def waiting(self) -> int:
        """The pid of the process that waits for a training, once it does."""
        until(lambda: (self.real.root / "prewarmed.sock").exists(), timeout_s=240)
        pid: int = self.described()["pid"]
        return pid

    def described(self) -> dict[str, int]:
        found: dict[str, int] = json.loads((self.real.root / "prewarmed.json").read_text())
        return found

    def family(self, workload: str) -> tuple[psutil.Process, psutil.Process, list[psutil.Process]]:
        """The watcher and the agent of a workload, and what runs below the agent."""
        watcher, agent = (json.loads((self.real.root / workload / f"{name}.json").read_text())["pid"] for name in ("watcher", "process"))
        return psutil.Process(watcher), psutil.Process(agent), psutil.Process(agent).children(recursive=True)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Prewarming]:
    """One home for all jobs of a test."""
    made = Prewarming(tmp_path / "work" / "launcher")
    yield made
    prewarmed.end(made.real.root)


@pytest.fixture
def real_job(
    new_job: Callable[..., Job], launcher: Prewarming, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], Job]:
    """Makes a job of a tiny model and that many epochs of 6 steps."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    directory = build_tiny_model(tmp_path_factory.mktemp("models") / "tiny-base")
    models = Catalogue({"tiny-base": ({"id": "tiny-base", "path": str(directory), "license": "Apache-2.0"}, directory)})

    def make(epochs: int) -> Job:
        names = ("pack_fingerprint", "dataset_id", "max_seq_len", "lora", "seed")
        fields = {name: getattr(SPEC, name) for name in names} | {"optimization": replace(SPEC.optimization, num_epochs=epochs)}
        job = new_job(models=models, checkpoint=CheckpointPolicy(every_steps=4), **fields)
        home = launcher.real.root.parents[1]
        job.platform = replace(job.platform, settings=replace(job.platform.settings, home=home))
        job.launcher = launcher
        pack = write_pack(tmp_path_factory.mktemp("pack"))
        upload(job.platform.objects, pack, layout.pack_prefix(job.tenant, SPEC.pack_fingerprint))
        return job

    return make


def comm(process: psutil.Process) -> str:
    return Path(f"/proc/{process.pid}/comm").read_text().strip()


def exit_codes(job: Job) -> list[int | None]:
    with job.platform.engine.connect() as conn:
        query = attempts_table.select().where(attempts_table.c.job_id == job.id).order_by(attempts_table.c.attempt)
        return [row.exit_code for row in conn.execute(query)]


def test_a_prewarmed_training_ends_with_the_bytes_of_a_cold_one(real_job: Callable[[int], Job], launcher: Prewarming) -> None:
    cold = real_job(3)
    assert cold.run() is JobState.EVALUATING, cold.launcher.read_log(cold.launcher.names[-1])
    waiting = launcher.waiting()
    recorded = launcher.described()
    assert stat.S_IMODE((launcher.real.root / "prewarmed.sock").stat().st_mode) == 0o600
    assert os.getpriority(os.PRIO_PROCESS, waiting) == os.getpriority(os.PRIO_PROCESS, 0), "only its imports give way"

    warm = real_job(3)
    held = warm.claim()
    ending = warm.follow(held)
    assert attempts.finish(warm.platform, held, ending) is JobState.EVALUATING
    assert [(launcher.real.root / name / "watch.log").exists() for name in launcher.names] == [True, False], "the first one started cold"
    assert warm.weights() == cold.weights()
    assert exit_codes(warm) == exit_codes(cold) == [0]
    assert not alive(recorded["pid"], str(recorded["identity"])), "it serves one training"
    assert launcher.waiting() != waiting, "and leaves another for the next one"


@pytest.mark.parametrize(
    ("victim", "signum", "outcome", "code"),
    [("agent", signal.SIGKILL, "node_lost", -9), ("agent", signal.SIGTERM, "preempted", 0), ("trainer", signal.SIGKILL, "node_lost", 0)],
)
def test_kills_end_a_prewarmed_attempt_like_a_cold_one(
    real_job: Callable[[int], Job], launcher: Prewarming, victim: str, signum: signal.Signals, outcome: str, code: int
) -> None:
    launcher.real.root.mkdir(parents=True)
    prewarmed.start(launcher.real.root, workload_environment({}))
    launcher.waiting()
    job = real_job(100)
    held = job.claim()
    endings: list[Ending] = []
    thread = threading.Thread(target=lambda: endings.append(job.follow(held)), daemon=True)
    thread.start()
    until(lambda: len(job.steps()) >= 1, timeout_s=120)
    watcher, agent, below = launcher.family(held.workload)
    (trainer,) = below
    assert (comm(watcher), comm(agent), comm(trainer)) == ("python", "ft-agent", NAME)
    assert agent.ppid() == watcher.pid and os.getsid(agent.pid) == os.getpgid(trainer.pid) == agent.pid != os.getsid(watcher.pid)
    assert trainer.cwd() == str(job.work_dir) and agent.cwd() == str(launcher.real.root / held.workload)
    outputs = [Path(f"/proc/{trainer.pid}/fd/{number}").readlink() for number in (0, 1, 2)]
    log = job.work_dir / f"train-a{held.attempt}.log"
    assert outputs == [Path("/dev/null"), log, log]
    descriptors = set[str]()
    for link in Path(f"/proc/{trainer.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            descriptors.add(str(link.readlink()))
    assert not [name for name in descriptors if "socket" in name or "/launcher" in name], descriptors
    (agent if victim == "agent" else trainer).send_signal(signum)
    until(lambda: not trainer.is_running() or trainer.status() == psutil.STATUS_ZOMBIE, timeout_s=40)
    thread.join(60)
    attempts.finish(job.platform, held, endings[0])
    assert (endings[0].outcome, exit_codes(job)) == (outcome, [code])
    failure = endings[0].failure
    assert failure is not None
    assert ("exit code 1" in failure.message) == (victim == "trainer"), "torchrun reports 1 for a rank that a signal ended"
