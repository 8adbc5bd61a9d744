"""A Kubernetes API server, played, with nodes, and launchers that start workloads on it."""

from __future__ import annotations

import time
from contextlib import ExitStack

from control_plane.platform.protocols import WorkloadPhase, WorkloadStatus
from core.retries import RetryPolicy
from core.workload import Kind, NodeShare, Workload
from engine.scheduler.pools import Pool, equal_nodes
from resources.launcher.kubernetes_api import KubernetesApi
from resources.launcher.kubernetes_launcher import KubernetesLauncher
from tests.support.kubernetes.kubernetes_api import Cluster, Key, Object, served
from tests.support.kubernetes.kubernetes_nodes import Nodes

NAME, TOKEN = "ftjob-1-a1", "an-attempts-token"
FABRIC = Pool(name="fabric", nodes=equal_nodes(32, prefix="f", fabric="ib"), gpu_type="h100-80gb", max_gpus_per_job=32)
SPOT = Pool(name="cheap", nodes=equal_nodes(8, prefix="c"), gpu_type="h100-80gb", max_gpus_per_job=8, pricing="spot")
POOLS = {pool.name: pool for pool in (FABRIC, SPOT)}
ABSENT, PENDING, RUNNING, EXITED, LOST = WorkloadPhase


def workload(name: str = NAME, *, num_nodes: int = 1, gpus: int = 8, pool: str = "fabric") -> Workload:
    return Workload(
        name=name, kind=Kind.TRAIN, tenant="acme", job="ftjob-1", attempt=1, module="engine.training.runtime",
        processes=(gpus,) * num_nodes, report_to="http://ft-api.ft-platform:8000", image="registry.example/ft@sha256:" + "0" * 64,
        placement=tuple(NodeShare(node=f"f-{n}", devices=tuple(range(gpus))) for n in range(num_nodes)),
        labels={"tenant": "acme", "job": "ftjob-1", "pool": pool, "tier": "premium"},
        env={"FT_JOB": "ftjob-1"},
    )  # fmt: skip


class Impatient(KubernetesLauncher):
    start_retries = RetryPolicy(first_s=0.05, most_s=0.1, give_up_s=1.0)


class Bench:
    """A cluster with the namespace of tenant acme, and launchers that processes of the platform would have."""

    def __init__(self, stack: ExitStack) -> None:
        self.cluster = Cluster()
        self.nodes = Nodes(self.cluster)
        self.client = stack.enter_context(served(self.cluster))
        self.stack, self.ahead_s = stack, 0.0
        self.prepare()
        self.at_first = set(self.cluster.objects)
        self.launcher = self.another()

    def prepare(self) -> None:
        self.cluster.create("namespaces", "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "t-acme"}})

    def another(self) -> KubernetesLauncher:
        """A launcher of another process."""
        made = Impatient(KubernetesApi(self.client), namespace="ft-platform", pools=POOLS, clock=self.clock)
        self.stack.callback(made.close)
        return made

    def clock(self) -> float:
        return time.time() + self.ahead_s

    def follower(self) -> KubernetesLauncher:
        """A launcher that follows the workloads through watches."""
        made = self.another()
        made.list()
        return made

    def started(self, *, num_nodes: int = 1) -> None:
        """The workload runs."""
        self.launcher.start_or_adopt(workload(num_nodes=num_nodes), token=TOKEN)
        self.nodes.admit(NAME)
        self.nodes.run(NAME)

    def get(self) -> WorkloadStatus:
        return self.launcher.get(NAME)

    def created(self, plural: str) -> int:
        return sum(event == "ADDED" and of == plural for _, event, of, _ in self.cluster.events)

    def left(self, namespace: str) -> list[Key]:
        """What was added to a namespace."""
        return [key for key in self.cluster.objects if key[1] == namespace and key not in self.at_first]

    def secret(self) -> Object:
        (found,) = self.cluster.find("secrets")
        return found

    def condition(self, kind: str) -> Object | None:
        return next((c for c in self.nodes.queued(NAME)["status"]["conditions"] if c["type"] == kind), None)
