"""Checks of a cluster that runs the workloads: Kubernetes, Kueue and its queues, nodes, images. They only read."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from control_plane.capacity import kueue
from control_plane.capacity.kueue import Manifest
from control_plane.composition import open_platform
from control_plane.tenants import service as tenants
from core.errors import Conflict
from deploy.doctor.check_findings import Check, Finding, Site, clock, date_header, ok, problem, skipped, warning
from deploy.doctor.fixes import apply_queues, elsewhere, upgrade
from engine.adapters import IMAGE_DIGEST
from engine.scheduler import Pool
from resources.launcher import on_kubernetes
from resources.launcher.kubernetes_api import BY_KIND, CLUSTER_QUEUES, DEPLOYMENTS, NODES, PODS, Forbidden, KubernetesApi
from resources.launcher.kubernetes_manifests import WORKLOAD

KUBERNETES, KUEUE = (1, 30), (0, 19)
"""Oldest versions (docs/operations/install-on-kubernetes.md)."""
CONTROLLER = ("kueue-controller-manager", "kueue-system")
"""Name and namespace of Kueue's Deployment, as its manifests and its chart have them."""
VERSION = re.compile(r"v?(\d+)\.(\d+)\.\d+")
NOT_PULLED = frozenset({"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"})
SHOWN = 5
"""Names that a finding lists."""
ClusterCheck = Callable[[Site, KubernetesApi], Iterator[Finding]]


def on_cluster(check: ClusterCheck) -> Check:
    """Make a check of one that reads the cluster; it is skipped without a cluster, or without the right to read it."""

    @functools.wraps(check)
    def run(site: Site) -> Iterator[Finding]:
        if not on_kubernetes():
            yield skipped("workloads run on this machine (FT_EXECUTOR is not k8s)")
            return
        try:
            api = KubernetesApi.from_environment()
        except Conflict:
            yield skipped(f"this process has no account on the cluster; run {elsewhere()}")
            return
        try:
            yield from check(site, api)
        except Forbidden as error:
            yield skipped(f"no right: {error.message}; run {elsewhere()}")

    return run


@on_cluster
def kubernetes(site: Site, api: KubernetesApi) -> Iterator[Finding]:
    asked = site.clock()
    body, date = api.about("/version") or ({"gitVersion": ""}, "")
    answered = site.clock()
    yield _version(
        f"Kubernetes {body['gitVersion']}", body["gitVersion"], KUBERNETES, "upgrade the cluster's control plane: kubectl version"
    )
    if date:
        yield clock("the Kubernetes API", *date_header(date), asked=asked, answered=answered)


@on_cluster
def kueue_version(_site: Site, api: KubernetesApi) -> Iterator[Finding]:
    manifests = "https://github.com/kubernetes-sigs/kueue/releases/download/v0.19.0/manifests.yaml"
    install = f"kubectl apply --server-side -f {manifests}"
    group, _, version = kueue.API.partition("/")
    found = api.about(f"/apis/{group}")
    served = [each["version"] for each in found[0]["versions"]] if found else []
    if version not in served:
        yield problem(f"the cluster serves {', '.join(served) or 'no version'} of {group} and {version} is needed", install)
        return
    name, namespace = CONTROLLER
    deployment = api.get(DEPLOYMENTS, name, namespace)
    if deployment is None:
        yield skipped(f"no Deployment {namespace}/{name} tells Kueue's version; the cluster serves {kueue.API}")
        return
    image = deployment["spec"]["template"]["spec"]["containers"][0]["image"]
    yield _version(f"Kueue, from the image of Deployment {namespace}/{name}: {image}", image.rpartition("/")[2], KUEUE, install)


def _version(what: str, text: str, oldest: tuple[int, int], fix: str) -> Finding:
    needed = f"{oldest[0]}.{oldest[1]} or later"
    if (found := VERSION.search(text)) is None:
        return skipped(f"{what} names no version ({needed})")
    version = int(found[1]), int(found[2])
    return ok(f"{what} ({needed})") if version >= oldest else problem(f"{what} ({needed})", fix)


@on_cluster
def queues(site: Site, api: KubernetesApi) -> Iterator[Finding]:
    platform = open_platform(site.settings)
    pools, held = kueue.pools_now(platform)
    wanted = kueue.render(pools, held) + [made for t in tenants.list_all(platform) for made in kueue.render_tenant(t.id, t.tier, pools)]
    found = {_key(each, kind): each for kind in {made["kind"] for made in wanted} for each in api.list(BY_KIND[kind], labels="")}
    wrong = [
        problem(f"{' '.join(filter(None, key))} does not exist", apply_queues()) for made in wanted if (key := _key(made)) not in found
    ]
    live = [{"kind": "ClusterQueue", **each} for (kind, *_), each in found.items() if kind == "ClusterQueue"]
    for queue in live:
        active, name = _condition(queue, "Active"), queue["metadata"]["name"]
        if active.get("status") != "True":
            message = active.get("message", "Kueue has not looked at it")
            wrong.append(problem(f"ClusterQueue {name} is not active: {message}", f"kubectl describe clusterqueue {name}"))
    wrong += [problem(text, apply_queues()) for text in kueue.differences(live, pools, held)]
    yield from wrong or [ok(f"{len(wanted)} objects exist, {len(live)} ClusterQueues are active, and their quotas match the pools")]


def _key(found: Manifest, kind: str = "") -> tuple[str, str, str]:
    """Return kind (lists leave it out), namespace and name."""
    return kind or found["kind"], found["metadata"].get("namespace", ""), found["metadata"]["name"]


@on_cluster
def nodes(site: Site, api: KubernetesApi) -> Iterator[Finding]:
    pools, held = kueue.pools_now(open_platform(site.settings))
    pools = kueue.on_cluster(pools)
    quotas = kueue.gpu_quotas(api.list(CLUSTER_QUEUES, labels=""))
    found = {node["metadata"]["name"]: node for node in api.list(NODES, labels="")}
    for pool in pools:
        yield from _pool_nodes(pool, found)
        yield _pool_gpus(pool, found, quota=quotas[kueue.flavor_name(pool)] - kueue.leaving(pool, held))
    stray = [name for name, node in found.items() if _gpus(node) and not any(_selected(node, pool) for pool in pools)]
    if stray:
        fix = f"kubectl label --overwrite node {stray[0]} {kueue.POOL_LABEL}=POOL {kueue.GPU_LABEL}=TYPE, and add it to the pools"
        yield warning(f"GPU nodes that no flavor matches: {_some(stray)}", fix)


def _pool_nodes(pool: Pool, found: Mapping[str, Manifest]) -> Iterator[Finding]:
    """Compare the nodes in the pools file that are not drained with the cluster's."""
    labels = " ".join(f"{name}={value}" for name, value in kueue.node_selector(pool).items())
    wanted = {node.name: node.num_gpus for node in pool.nodes if node.ready}
    present = {name: found[name] for name in wanted if name in found}
    if absent := [name for name in wanted if name not in found or not _usable(found[name])]:
        text = f"pool {pool.name}: nodes not Ready or not in the cluster: {_some(absent)}"
        yield warning(text, f"kubectl describe node {absent[0]}")
    if unlabelled := [name for name, node in present.items() if not _selected(node, pool)]:
        text = f"pool {pool.name}: nodes without the labels {labels}: {_some(unlabelled)}"
        yield problem(text, f"kubectl label --overwrite node {' '.join(unlabelled)} {labels}")
    if other := [f"{name} has {_gpus(node)}, not {wanted[name]}" for name, node in present.items() if _gpus(node) != wanted[name]]:
        fix = "correct gpus in the pools file, or repair the device plugin: kubectl get pods --all-namespaces | grep device-plugin"
        yield problem(f"pool {pool.name}: allocatable {kueue.GPU_RESOURCE} differs from the pools file: {_some(other)}", fix)


def _pool_gpus(pool: Pool, found: Mapping[str, Manifest], *, quota: int) -> Finding:
    """Compare Kueue's `quota` with the GPUs that a pool's flavor finds on nodes that are not drained."""
    drained = {node.name for node in pool.nodes if not node.ready}
    matching = [node for name, node in found.items() if name not in drained and _usable(node) and _selected(node, pool)]
    ready = sum(map(_gpus, matching))
    text = f"flavor {kueue.flavor_name(pool)}: {ready} GPUs on {len(matching)} Ready nodes, {quota} in Kueue's quota"
    if ready < quota or not matching:
        return problem(
            f"{text}: Kueue admits jobs that find no node", "repair the nodes, or: ft admin nodes drain NODE --reason 'not ready'"
        )
    if ready > quota:
        return warning(f"{text}: the others stay idle", apply_queues() if quota < pool.num_gpus else "add the nodes to the pools file")
    return ok(text)


@on_cluster
def images(_site: Site, api: KubernetesApi) -> Iterator[Finding]:
    image = os.environ.get("FT_IMAGE", "")
    if IMAGE_DIGEST.fullmatch(image):
        yield ok(f"trainer's image is named by its digest: {image}")
    else:
        yield problem(f"FT_IMAGE {image!r} is not <repository>@sha256:<64 digits>", f"set images.trainer.digest, then: {upgrade()}")
    pods = api.list(PODS, labels=WORKLOAD)
    stuck = [(pod, waiting) for pod in pods for waiting in _waiting(pod) if waiting.get("reason") in NOT_PULLED]
    for pod, waiting in stuck[:SHOWN]:
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        text = f"pod {namespace}/{name}: {waiting['reason']}: {waiting.get('message', '')}"
        yield problem(text, f"kubectl describe pod --namespace {namespace} {name}")
    if not stuck:
        yield ok(f"no pod of {len(pods)} in tenants' namespaces waits for its image")


def _waiting(pod: Manifest) -> list[Manifest]:
    statuses = [each for kind in ("initContainerStatuses", "containerStatuses") for each in pod.get("status", {}).get(kind, ())]
    return [each["state"]["waiting"] for each in statuses if "waiting" in each.get("state", {})]


def _condition(found: Manifest, kind: str) -> Manifest:
    """Return a condition; empty if there is none."""
    return next((each for each in found.get("status", {}).get("conditions", ()) if each["type"] == kind), {})


def _usable(node: Manifest) -> bool:
    return bool(_condition(node, "Ready").get("status") == "True") and not node["spec"].get("unschedulable")


def _selected(node: Manifest, pool: Pool) -> bool:
    return bool(kueue.node_selector(pool).items() <= node["metadata"].get("labels", {}).items())


def _gpus(node: Manifest) -> int:
    return int(node.get("status", {}).get("allocatable", {}).get(kueue.GPU_RESOURCE, 0))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


CHECKS: dict[str, Check] = {
    "Kubernetes": kubernetes, "Kueue": kueue_version, "Kueue's queues": queues, "nodes": nodes, "images": images,
}  # fmt: skip
