"""Real agents in the pods of a gang, each with its own files, as its Job says: they meet, train, are evicted and resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from control_plane.attempts import service as attempts
from control_plane.capacity import kueue
from control_plane.jobs import service as jobs
from control_plane.platform.job_states import JobState
from engine.scheduler.pools import Node, Pool
from resources.launcher.kubernetes_api import KubernetesApi
from resources.launcher.kubernetes_launcher import KubernetesLauncher
from tests.support.jobs.followed_jobs import Job, plain_weights, until
from tests.support.kubernetes.kubernetes_api import Cluster, served
from tests.support.kubernetes.kubernetes_kubelet import Kubelet
from tests.support.kubernetes.kubernetes_nodes import Nodes
from tests.support.processes.scripted_training import Scenario

POOL = Pool(name="local", nodes=tuple(Node(name=f"local-{n}", num_gpus=1) for n in range(2)), gpu_type="local", max_gpus_per_job=2)


@dataclass
class Gang:
    job: Job
    cluster: Cluster
    nodes: Nodes
    kubelet: Kubelet
    scenario: Scenario


@pytest.fixture
def gang(new_job: Callable[..., Job], tmp_path: Path) -> Iterator[Gang]:
    (tmp_path / "pools.yaml").write_text("pools: [{name: local, gpu_type: local, nodes: [{count: 2, gpus: 1}]}]")
    image = "registry.example/ft@sha256:" + "0" * 64
    job = new_job(env={"pools": str(tmp_path / "pools.yaml")}, strategy="ddp", world_size=2, image=image)
    cluster = Cluster()
    nodes = Nodes(cluster)
    cluster.create("namespaces", "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": kueue.namespace(job.tenant)}})
    kubelet = Kubelet(cluster, nodes, tmp_path / "pods", prepare=lambda _number, node: made.scenario.write(node / "jobs" / job.id))
    with ExitStack() as stack:
        api = KubernetesApi(stack.enter_context(served(cluster)))
        launcher = KubernetesLauncher(api, namespace="ft-platform", pools={"local": POOL})
        stack.callback(launcher.close)
        stack.callback(job.launcher.names.clear)
        job.launcher.real = launcher  # type: ignore[assignment]
        made = Gang(job, cluster, nodes, kubelet, Scenario(steps=6))
        stack.enter_context(kubelet.running())
        yield made


@pytest.mark.slow
def test_the_agents_of_a_gang_find_all_they_need_in_their_pods_and_train_to_the_end(gang: Gang) -> None:
    assert gang.job.run() is JobState.EVALUATING
    assert gang.job.weights() == plain_weights(6)
    assert len(gang.kubelet.processes) == 2
    assert [event.data["step"] for event in gang.job.events("metrics")] == list(range(1, 7)), "the first node reports"
    status = gang.job.launcher.get(f"{gang.job.id}-a1")
    assert (status.exit_code, status.nodes) == (0, ("node-0", "node-1"))


def test_a_gang_that_kueue_evicts_saves_a_checkpoint_and_its_next_attempt_ends_with_the_same_bytes(gang: Gang) -> None:
    job = gang.job
    gang.scenario = Scenario(steps=40, step_s=0.1)
    held = job.claim()

    def evict_once() -> None:
        if (jobs.get(job.platform, job.tenant, job.id).job.step or 0) >= 3 and not evicted:
            evicted.append(held.workload)
            gang.nodes.evict(held.workload)

    evicted: list[str] = []
    job.launcher.looked_at = evict_once
    ending = job.follow(held)
    assert (ending.outcome, evicted) == ("preempted", [held.workload])
    assert ending.last_step in job.steps(), "what the agents wrote in their grace period is stored"
    until(lambda: not gang.nodes.admit(held.workload), timeout_s=10)
    gang.scenario = Scenario(steps=40, step_s=0.0)
    state = job.run()
    assert (state, job.weights()) == (JobState.EVALUATING, plain_weights(40))
    assert job.from_steps() == [0, ending.last_step], "no step was lost"
    assert attempts.committed(job.platform, job.id)[0].attempt == 2
