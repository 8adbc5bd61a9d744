"""Two real agents in separate directories, one rank each, that meet over loopback: killed, resumed elsewhere, bit-identical to one node."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("torch", reason="needs the training environment")

from control_plane.attempts import service as attempts
from control_plane.attempts.claims import Ending
from control_plane.platform.job_states import JobState
from control_plane.platform.protocols import WorkloadStatus
from control_plane.platform.transfer import upload
from core import layout
from core.base_models import Catalogue
from core.workload import Workload
from engine.training.checkpoints import committed_checkpoints, read_manifest
from engine.training.spec import CheckpointPolicy
from tests.control_plane.attempts.test_gangs import TWO_NODES, agent_of, node_dir
from tests.engine.training.attempts import SPEC, write_pack
from tests.support.jobs.followed_jobs import Job, Scripted, until
from tests.support.models.tiny_model import build_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
OPTIMIZATION = replace(SPEC.optimization, num_epochs=60, accumulation_steps=1)
FULL: dict[str, Any] = {"adapter": "full", "lora": None}
EVERY = 60
"""Steps between checkpoints, of some 300."""


class Real(Scripted):
    """The local launcher, whose agents run torchrun."""

    def start_or_adopt(self, workload: Workload, *, token: str = "") -> WorkloadStatus:
        self.names.append(workload.name)
        return self.real.start_or_adopt(workload, token=token)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Catalogue:
    directory = build_tiny_model(tmp_path_factory.mktemp("models") / "tiny-base")
    return Catalogue({"tiny-base": ({"id": "tiny-base", "path": str(directory), "license": "Apache-2.0"}, directory)})


@pytest.fixture
def trained_on(new_job: Callable[..., Job], models: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    """Makes a job of two ranks on that many nodes, whose training is real."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    pools = tmp_path / "pools.yaml"
    pools.write_text(TWO_NODES)

    def make(nodes: int, **changes: Any) -> Job:
        env = {"pools": str(pools)} if nodes == 2 else {"local_gpus": "2"}
        fields = {name: getattr(SPEC, name) for name in ("pack_fingerprint", "dataset_id", "max_seq_len", "lora", "seed")}
        fields |= {"world_size": 2, "optimization": OPTIMIZATION, "checkpoint": CheckpointPolicy(every_steps=EVERY)}
        job = new_job(env=env, models=models, **{**fields, **changes})
        job.launcher = Real(job.launcher.real.root)
        upload(
            job.platform.objects,
            write_pack(job.platform.settings.home / "real-pack"),
            layout.pack_prefix(job.tenant, SPEC.pack_fingerprint),
        )
        return job

    return make


def run(job: Job) -> tuple[Ending, JobState]:
    held = job.claim()
    ending = job.follow(held, timeout_s=400.0)
    return ending, attempts.finish(job.platform, held, ending)


def rank_of(workload: str, node: int) -> psutil.Process:
    (rank,) = [p for p in agent_of(workload, node).children(recursive=True) if p.environ().get("RANK") == str(node)]
    return rank


@pytest.mark.parametrize(
    ("changes", "killed", "weights"),
    [({"strategy": "ddp"}, "agent", "adapter_model.safetensors"), ({"strategy": "fsdp2", **FULL}, "rank", "model.safetensors")],
    ids=["ddp", "fsdp2"],
)
def test_two_nodes_that_were_killed_and_went_on_elsewhere_end_with_the_bytes_of_one(
    trained_on: Callable[..., Job], tmp_path: Path, changes: dict[str, Any], killed: str, weights: str
) -> None:
    alone = trained_on(1, **changes)
    ending, state = run(alone)
    assert (ending.outcome, state) == ("succeeded", JobState.EVALUATING), alone.launcher.read_log(alone.launcher.names[-1])

    gang = trained_on(2, **changes)
    held = gang.claim()
    endings: list[Ending] = []
    thread = threading.Thread(target=lambda: endings.append(gang.follow(held, timeout_s=400.0)), daemon=True)
    thread.start()
    until(lambda: gang.steps(), timeout_s=200.0)
    found = agent_of(held.workload, 1) if killed == "agent" else rank_of(held.workload, 1)
    found.kill()
    thread.join(120)
    assert endings[0].outcome == "node_lost"
    assert 0 < endings[0].last_step < alone.steps()[0], "it was killed on the way"
    if changes["strategy"] == "fsdp2":
        parts = [read_manifest(committed_checkpoints(node_dir(gang, node) / "checkpoints")[-1]) for node in range(2)]
        assert [(part.node, part.num_nodes) for part in parts] == [(0, 2), (1, 2)]
        assert {name.rpartition("/")[2][:3] for name in parts[1].files} == {"__1"}, "each node has the files of its own rank"
    else:
        assert not committed_checkpoints(node_dir(gang, 1) / "checkpoints"), "the first node saves alone"

    saved = gang.steps()[0]
    settings = replace(gang.platform.settings, home=tmp_path / "elsewhere")
    elsewhere = Job(replace(gang.platform, settings=settings), gang.tenant, gang.id, Real(settings.work_dir / "launcher"))
    try:
        ending, state = run(elsewhere)
    finally:
        elsewhere.launcher.stop(elsewhere.launcher.names[-1], grace_s=1.0)
    assert (ending.outcome, state) == ("succeeded", JobState.EVALUATING), elsewhere.launcher.read_log(elsewhere.launcher.names[-1])
    assert gang.from_steps() == [0, saved]
    final = [next(row for row in attempts.committed(job.platform, job.id) if row.final).object_prefix for job in (alone, gang)]
    assert gang.platform.objects.get_bytes(f"{final[1]}/{weights}") == alone.platform.objects.get_bytes(f"{final[0]}/{weights}")
