"""What the doctor finds in a cluster: nothing in a healthy one, and each fault where it is, with what to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from control_plane.capacity import nodes
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from deploy.doctor.check_findings import Finding, Site, run
from deploy.doctor.cluster_checks import CHECKS
from resources.launcher.kubernetes_manifests import WORKLOAD
from tests.support.kubernetes.installed_cluster import IMAGE, add_node, change, installed
from tests.support.kubernetes.kubernetes_api import Cluster, kubeconfig, served

POOLS = """
pools:
  - {name: small, gpu_type: h100-80gb, takes: [lora], nodes: [{count: 2, gpus: 8}]}
  - {name: wide, gpu_type: h100-80gb, takes: [full, large], nodes: [{count: 2, gpus: 8, fabric: ib}]}
"""


@dataclass
class World:
    platform: Platform
    cluster: Cluster

    def examine(self, only: str = "", *, clock: Callable[[], float] = time.time) -> dict[str, list[Finding]]:
        checks = {name: check for name, check in CHECKS.items() if only in ("", name)}
        return run(checks, Site(settings=self.platform.settings, clock=clock))

    def bad(self, only: str = "") -> list[Finding]:
        return [each for found in self.examine(only).values() for each in found if each.status != "ok"]


@pytest.fixture(scope="module")
def pooled(new_platform: Callable[..., Platform], tmp_path_factory: pytest.TempPathFactory) -> Platform:
    file = tmp_path_factory.mktemp("pools") / "pools.yaml"
    file.write_text(POOLS)
    platform = new_platform(pools=str(file))
    tenants.create(platform, "acme", tier="premium")
    return platform


@pytest.fixture
def world(pooled: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    cluster = installed(pooled)
    with served(cluster) as client:
        (tmp_path / "kubeconfig").write_text(kubeconfig(client))
        for name, value in {"KUBECONFIG": str(tmp_path / "kubeconfig"), "FT_EXECUTOR": "k8s", "FT_IMAGE": IMAGE}.items():
            monkeypatch.setenv(name, value)
        yield World(pooled, cluster)


def test_a_healthy_cluster_gives_only_ok(world: World) -> None:
    found = world.examine()
    assert [name for name, each in found.items() if not each] == []
    assert {each.status for findings in found.values() for each in findings} == {"ok"}, found
    assert "kueue:v0.19.1 (0.19 or later)" in found["Kueue"][0].found
    assert found["nodes"][0].found == "flavor h100-80gb-small: 16 GPUs on 2 Ready nodes, 16 in Kueue's quota"


def old_kubernetes(cluster: Cluster) -> None:
    cluster.about["/version"] = {"gitVersion": "v1.29.14-eks-1"}


def without_kueue(cluster: Cluster) -> None:
    del cluster.about["/apis/kueue.x-k8s.io"]


def old_api_of_kueue(cluster: Cluster) -> None:
    cluster.about["/apis/kueue.x-k8s.io"] = {"versions": [{"version": "v1beta1"}]}


def kueue_image(image: str) -> Callable[[Cluster], None]:
    spec = {"template": {"spec": {"containers": [{"name": "manager", "image": image}]}}}
    return lambda cluster: change(cluster, "deployments", "kueue-controller-manager", "kueue-system", spec=spec)


def inactive(cluster: Cluster) -> None:
    why = {"type": "Active", "status": "False", "message": "Can't admit new workloads: references missing ResourceFlavor(s): x."}
    change(cluster, "clusterqueues", "standard-small", status={"conditions": [why]})


def removed(plural: str, name: str, namespace: str = "") -> Callable[[Cluster], None]:
    def fault(cluster: Cluster) -> None:
        del cluster.objects[plural, namespace, name]

    return fault


def preempting(cluster: Cluster) -> None:
    spec = cluster.objects["clusterqueues", "", "free-small"]["spec"]
    change(cluster, "clusterqueues", "free-small", spec={**spec, "preemption": {"withinClusterQueue": "LowerPriority"}})


def unlabelled(cluster: Cluster) -> None:
    node = cluster.objects["nodes", "", "small-1"]
    change(cluster, "nodes", "small-1", metadata={**node["metadata"], "labels": {}})


def all_unlabelled(cluster: Cluster) -> None:
    unlabelled(cluster)
    change(cluster, "nodes", "small-0", metadata={**cluster.objects["nodes", "", "small-0"]["metadata"], "labels": {}})


def without_gpus(cluster: Cluster) -> None:
    change(cluster, "nodes", "small-0", status={"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {"cpu": "96"}})


def not_ready(cluster: Cluster) -> None:
    status = cluster.objects["nodes", "", "wide-1"]["status"]
    change(cluster, "nodes", "wide-1", status={**status, "conditions": [{"type": "Ready", "status": "Unknown"}]})


def stray(cluster: Cluster) -> None:
    add_node(cluster, "new-7", 8, {})


def not_in_the_file(cluster: Cluster) -> None:
    add_node(cluster, "new-7", 8, {"ft-platform/pool": "wide", "ft-platform/gpu": "h100-80gb"})


def not_pulled(cluster: Cluster) -> None:
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "registry.example/ft"'}}
    pod = {"kind": "Pod", "metadata": {"name": "ftjob-1-0", "labels": {WORKLOAD: "ftjob-1"}}, "spec": {}}
    cluster.create("pods", "t-acme", {**pod, "status": {"containerStatuses": [{"name": "agent", "state": waiting}]}})


FAULTS: dict[str, tuple[Callable[[Cluster], None], str, list[tuple[str, str, str]]]] = {
    "Kubernetes is old": (old_kubernetes, "Kubernetes", [("problem", "v1.29.14-eks-1 (1.30 or later)", "kubectl version")]),
    "Kueue is not installed": (without_kueue, "Kueue", [("problem", "no version of kueue.x-k8s.io", "kubectl apply --server-side")]),
    "Kueue serves an older API": (old_api_of_kueue, "Kueue", [("problem", "serves v1beta1", "kubectl apply --server-side")]),
    "Kueue is old": (
        kueue_image("10.0.0.1:5000/kueue/kueue:v0.18.3@sha256:00"), "Kueue",
        [("problem", "Deployment kueue-system/kueue-controller-manager: 10.0.0.1:5000/kueue/kueue:v0.18.3@sha256:00", "kubectl apply")],
    ),
    "Kueue's image names no version": (kueue_image("kueue@sha256:00"), "Kueue", [("skipped", "names no version", "")]),
    "Kueue is elsewhere": (
        removed("deployments", "kueue-controller-manager", "kueue-system"), "Kueue", [("skipped", "serves kueue.x-k8s.io/v1beta2", "")],
    ),
    "a ClusterQueue is inactive": (
        inactive, "Kueue's queues",
        [("problem", "standard-small is not active: Can't admit", "kubectl describe clusterqueue standard-small")],
    ),
    "a flavor is missing": (
        removed("resourceflavors", "h100-80gb-small"), "Kueue's queues",
        [("problem", "ResourceFlavor h100-80gb-small does not exist", "ft admin kueue | kubectl apply --server-side -f -")],
    ),
    "a tenant's queue is missing": (
        removed("localqueues", "premium-wide", "t-acme"), "Kueue's queues",
        [("problem", "LocalQueue t-acme premium-wide", "kubectl apply")],
    ),
    "Kueue would preempt": (preempting, "Kueue's queues", [("problem", "withinClusterQueue is LowerPriority", "kubectl apply")]),
    "a queue is missing, with its quota": (
        removed("clusterqueues", "standard-wide"), "Kueue's queues",
        [("problem", "ClusterQueue standard-wide does not exist", "ft admin kueue"), ("problem", "add up to 0 GPUs", "ft admin kueue")],
    ),
    "more GPUs than quota": (
        removed("clusterqueues", "standard-wide"), "nodes", [("warning", "16 GPUs on 2 Ready nodes, 0 in Kueue's quota", "ft admin kueue")],
    ),
    "a node has no labels": (
        unlabelled, "nodes", [
            ("problem", "labels ft-platform/pool=small ft-platform/gpu=h100-80gb: small-1",
             "kubectl label --overwrite node small-1 ft-platform/pool=small ft-platform/gpu=h100-80gb"),
            ("problem", "8 GPUs on 1 Ready nodes, 16 in Kueue's quota", "ft admin nodes drain"),
            ("warning", "no flavor matches: small-1", "kubectl label --overwrite node small-1"),
        ],
    ),
    "a flavor matches no node": (
        all_unlabelled, "nodes", [
            ("problem", "small-0, small-1", "kubectl label --overwrite node small-0 small-1"),
            ("problem", "h100-80gb-small: 0 GPUs on 0 Ready nodes", "drain"), ("warning", "no flavor matches", "kubectl label"),
        ],
    ),
    "the device plugin is missing": (
        without_gpus, "nodes", [("problem", "small-0 has 0, not 8", "device-plugin"), ("problem", "8 GPUs on 2 Ready nodes, 16", "drain")],
    ),
    "a node is not ready": (
        not_ready, "nodes", [
            ("warning", "not Ready or not in the cluster: wide-1", "kubectl describe node wide-1"),
            ("problem", "8 GPUs on 1 Ready nodes, 16", "drain"),
        ],
    ),
    "a node is missing": (
        removed("nodes", "wide-0"), "nodes", [("warning", "wide-0", "kubectl describe node wide-0"), ("problem", "8 GPUs on 1", "drain")],
    ),
    "a GPU node belongs to no pool": (stray, "nodes", [("warning", "no flavor matches: new-7", "kubectl label --overwrite node new-7")]),
    "a node is not in the pools file": (not_in_the_file, "nodes", [("warning", "24 GPUs on 3 Ready nodes, 16", "pools file")]),
    "an image is not pulled": (
        not_pulled, "images",
        [("problem", "pod t-acme/ftjob-1-0: ImagePullBackOff: Back-off pulling", "kubectl describe pod --namespace t-acme ftjob-1-0")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_is_found_where_it_is_with_what_to_do(world: World, case: str) -> None:
    fault, check, expected = FAULTS[case]
    fault(world.cluster)
    found = world.bad(check)
    assert [(each.status, text in each.found, fix in each.fix) for each, (_, text, fix) in zip(found, expected, strict=True)] == [
        (status, True, True) for status, _, _ in expected
    ], found


@pytest.mark.parametrize(("ahead_s", "status"), [(10.0, "warning"), (120.0, "problem"), (-120.0, "problem")])
def test_a_clock_that_differs_from_the_api_servers_is_found(world: World, ahead_s: float, status: str) -> None:
    world.cluster.ahead_s = ahead_s
    (found,) = world.bad("Kubernetes")
    assert found.status == status
    assert ("behind" if ahead_s > 0 else "ahead of") in found.found


def test_an_image_without_a_digest_is_found(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_IMAGE", "registry.example/ft:latest")
    (found,) = world.bad("images")
    assert (found.status, "'registry.example/ft:latest'" in found.found) == ("problem", True)


def test_a_drained_node_is_expected_in_neither_quota_nor_cluster(world: World) -> None:
    nodes.drain(world.platform, "wide-1", reason="new fans", by="ops")
    try:
        cluster = installed(world.platform)
        world.cluster.objects = cluster.objects
        assert world.bad() == [], "its GPUs are not idle for want of quota"
        not_ready(world.cluster)
        assert world.bad() == []
    finally:
        nodes.undrain(world.platform, "wide-1")


def test_without_rights_without_an_account_and_without_a_cluster_nothing_is_checked(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(file.read_text().replace("token-of-the-administrator", "token-of-api"))
    found = world.examine()
    assert {each.status for each in found["Kubernetes"]} == {"ok"}, "every account may ask for the version"
    skipped = [each for name in ("Kueue", "Kueue's queues", "nodes") for each in found[name]] + found["images"][1:]
    assert [(each.status, "no right: GET" in each.found, "helm test" in each.found) for each in skipped] == [("skipped", True, True)] * 4
    monkeypatch.delenv("KUBECONFIG")
    assert {each.found.partition(";")[0] for each in world.bad()} == {"this process has no account on the cluster"}
    monkeypatch.delenv("FT_EXECUTOR")
    assert {(each.status, "FT_EXECUTOR is not k8s" in each.found) for each in world.bad()} == {("skipped", True)}


def test_a_cluster_that_does_not_answer_is_a_problem_of_each_check(world: World) -> None:
    world.cluster.faults.append(lambda _method, _path: "before")
    assert {each[-1].status for each in world.examine().values()} == {"problem"}
