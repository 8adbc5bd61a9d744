"""A cluster as an installation leaves it: Kueue, the queues of the pools and of the tenants, and nodes with labels and GPUs."""

from __future__ import annotations

from copy import deepcopy

from control_plane.capacity import kueue
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from tests.support.kubernetes.kubernetes_api import PLURALS, Cluster, Object, timestamp

IMAGE = "registry.example/ft@sha256:" + "0" * 64
READY = {"type": "Ready", "status": "True"}
ACTIVE = {"type": "Active", "status": "True", "reason": "Ready", "message": "Can admit new workloads"}


def installed(platform: Platform) -> Cluster:
    """Return the cluster of a platform's pools and tenants."""
    cluster = Cluster()
    cluster.about["/version"] = {"gitVersion": "v1.30.2"}
    cluster.about["/apis/kueue.x-k8s.io"] = {"versions": [{"version": "v1beta1"}, {"version": "v1beta2"}]}
    cluster.create("namespaces", "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kueue-system"}})
    container = {"name": "manager", "image": "registry.k8s.io/kueue/kueue:v0.19.1"}
    controller = {"kind": "Deployment", "metadata": {"name": "kueue-controller-manager"}}
    cluster.create("deployments", "kueue-system", {**controller, "spec": {"template": {"spec": {"containers": [container]}}}})
    pools, held = kueue.pools_now(platform)
    for made in kueue.render(pools, held):
        add(cluster, {**made, "status": {"conditions": [ACTIVE]}} if made["kind"] == "ClusterQueue" else made)
    for tenant in tenants.list_all(platform):
        for made in kueue.render_tenant(tenant.id, tenant.tier, pools):
            add(cluster, made)
    gpus = {node.name: node.num_gpus for pool in pools for node in pool.nodes}
    for name, labels in kueue.node_labels(pools):
        add_node(cluster, name, gpus[name], labels)
    return cluster


def add(cluster: Cluster, made: Object) -> None:
    cluster.create(PLURALS[made["kind"]], made["metadata"].get("namespace", ""), made)


def add_node(cluster: Cluster, name: str, num_gpus: int, labels: dict[str, str]) -> None:
    status = {"conditions": [{**READY, "lastTransitionTime": timestamp()}], "allocatable": {kueue.GPU_RESOURCE: str(num_gpus)}}
    add(cluster, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}, "spec": {}, "status": status})


def change(cluster: Cluster, plural: str, name: str, namespace: str = "", **parts: Object) -> None:
    """Replace parts of an object."""
    key = (plural, namespace, name)
    cluster.update(key, {**deepcopy(cluster.objects[key]), **parts})
