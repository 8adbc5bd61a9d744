"""Kueue objects for the pools; Kueue enforces on the nodes what the policy decides.

1. A pool is a cohort: a tier may borrow what another leaves unused, but not from another pool.
2. Each tier and pool has a queue. The nominal quotas of a pool's queues add up to its ready GPUs plus those that jobs still hold on drained
   nodes, whose pods count against the quota until they end; so Kueue can admit whatever the policy releases. Reserved GPUs are premium's
   nominal quota and are not lent; the rest is standard's, and free borrows it.
3. Kueue preempts nothing: the policy chooses victims by lost work and gives them time to save. Kueue's quotas alone would choose by
   priority and kill.
4. Kueue's queues are not strict, because the policy sets the order and releases a workload only when it fits; the first workload of a queue
   waits only for its pods to be placed.
5. A tenant has a namespace, with a queue for each tier up to its own and each pool that takes that tier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import yaml

from control_plane.capacity import configured_pools, nodes
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import TIERS
from core.errors import Conflict, InvalidRequest
from engine.adapters import objects_yaml
from engine.scheduler import RESERVED_FOR, Pool
from engine.training import GPUS

Manifest = dict[str, Any]
Held = Mapping[str, int]
"""GPUs that jobs hold, by node."""
NOTHING_HELD: Held = {}
API = "kueue.x-k8s.io/v1beta2"
POOL_LABEL, GPU_LABEL, FABRIC_LABEL = "ft-platform/pool", "ft-platform/gpu", "ft-platform/fabric"
"""Label of nodes."""
TENANT_LABEL, TIER_LABEL = "ft-platform/tenant", "ft-platform/tier"
"""Label of namespaces."""
HOST_LABEL = "kubernetes.io/hostname"
QUEUE_LABEL, PRIORITY_LABEL = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
"""Label of a Job: its LocalQueue, and its WorkloadPriorityClass."""
GPU_RESOURCE = "nvidia.com/gpu"
PRIORITIES = {"premium": 3000, "standard": 2000, "free": 1000}
"""Sets only the order in which Kueue considers released workloads; the gaps leave room for an operator's own."""
NEVER: Manifest = {"withinClusterQueue": "Never", "reclaimWithinCohort": "Never", "borrowWithinCohort": {"policy": "Never"}}
POD_SECURITY = {"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/enforce-version": "latest"}


def queue_name(tier: str, pool: str) -> str:
    """Annotation of a ClusterQueue, and of the LocalQueues that feed it."""
    return f"{tier}-{pool}"


def flavor_name(pool: Pool) -> str:
    return f"{pool.gpu_type}-{pool.name}"


def priority_class(tier: str) -> str:
    return f"ft-{tier}"


def namespace(tenant: str) -> str:
    """Namespace of a tenant's workloads. ``ft-platform`` is the platform's own and never a tenant's."""
    return f"t-{tenant}"


def node_selector(pool: Pool) -> dict[str, str]:
    """Return the labels of a pool's nodes."""
    return {POOL_LABEL: pool.name, GPU_LABEL: pool.gpu_type}


def tolerations(pool: Pool) -> list[Manifest]:
    """Return the tolerations of a pool's pods, which they need themselves: topology-aware scheduling ignores those of the flavor."""
    keys = [GPU_RESOURCE, *(["ft-platform/spot"] if pool.pricing == "spot" else [])]
    return [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in keys]


def pod_requests(pool: Pool, num_gpus: int) -> dict[str, str]:
    """Return what a pod with `num_gpus` of the pool requests; the queues' quotas count these resources only."""
    cpu, memory = num_gpus * pool.cpu_per_gpu, num_gpus * pool.memory_gib_per_gpu
    return {"cpu": str(cpu), "memory": f"{memory}Gi", GPU_RESOURCE: str(num_gpus)}


def topology_request(pool: Pool, num_nodes: int) -> dict[str, str]:
    """Return the annotation of a gang's pods: a gang of several nodes stays inside one fabric, if the pool has any."""
    if num_nodes > 1 and not _has_fabrics(pool):
        return {"kueue.x-k8s.io/podset-unconstrained-topology": "true"}
    return {"kueue.x-k8s.io/podset-required-topology": FABRIC_LABEL if num_nodes > 1 else HOST_LABEL}


def on_cluster(pools: Iterable[Pool]) -> list[Pool]:
    """Return the pools with GPUs of a cluster; slots of this machine are not part of one."""
    return [p for p in pools if not GPUS[p.gpu_type].is_cpu]


def leaving(pool: Pool, held: Held) -> int:
    """Return the GPUs of nodes that are not ready which jobs still hold."""
    return sum(min(n.num_gpus, held.get(n.name, 0)) for n in pool.nodes if not n.ready)


def nominal(pool: Pool, held: Held = NOTHING_HELD) -> dict[str, int]:
    """Return the nominal quota of each tier's queue; they add up to the ready GPUs plus those held on nodes that are not ready."""
    tiers = [tier for tier in TIERS if pool.widest(tier) > 0]
    owned, in_all = dict.fromkeys(tiers, 0), pool.num_gpus + leaving(pool, held)
    if RESERVED_FOR in owned:
        owned[RESERVED_FOR] = min(pool.reserved_gpus, in_all)
    rest = "standard" if "standard" in owned else RESERVED_FOR
    owned[rest] += in_all - sum(owned.values())
    return owned


def render(pools: Sequence[Pool], held: Held = NOTHING_HELD) -> list[Manifest]:
    """Return the objects that all tenants share; ``ValueError`` if no pool has GPUs."""
    found = on_cluster(pools)
    if not found:
        raise ValueError("no pool has GPUs of a cluster: all are slots of this machine; describe the cluster's in the file of FT_POOLS")
    priorities = [_priority(tier) for tier in TIERS]
    topologies = [
        _object("Topology", name, {"levels": [{"nodeLabel": level} for level in levels]})
        for name, levels in sorted({_topology_of(p) for p in found})
    ]
    cohorts = [_object("Cohort", p.name, {}) for p in found]
    queues = [_cluster_queue(p, tier, gpus) for p in found for tier, gpus in nominal(p, held).items()]
    return [*priorities, *topologies, *map(_flavor, found), *cohorts, *queues]


def render_tenant(tenant: str, tier: str, pools: Sequence[Pool]) -> list[Manifest]:
    """Return a tenant's namespace and its LocalQueues."""
    space = namespace(tenant)
    labels = {TENANT_LABEL: tenant, TIER_LABEL: tier, **POD_SECURITY}
    names = list(TIERS)
    queues = [
        _object("LocalQueue", queue_name(own, p.name), {"clusterQueue": queue_name(own, p.name)}, namespace=space)
        for p in on_cluster(pools)
        for own in names[: names.index(tier) + 1]
        if p.widest(own) > 0
    ]
    return [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": space, "labels": labels}}, *queues]


def node_labels(pools: Sequence[Pool]) -> list[tuple[str, dict[str, str]]]:
    """Return the nodes with the labels that flavors and topologies select."""
    return [
        (n.name, {POOL_LABEL: p.name, GPU_LABEL: p.gpu_type} | ({FABRIC_LABEL: n.fabric or f"{p.name}-other"} if _has_fabrics(p) else {}))
        for p in on_cluster(pools)
        for n in p.nodes
    ]


def differences(cluster: Iterable[Manifest], pools: Sequence[Pool], held: Held = NOTHING_HELD) -> list[str]:
    """Return the differences between a cluster's ClusterQueues and the pools, each with what to do; empty if they agree."""
    mine = [q for q in cluster if q.get("kind") == "ClusterQueue"]
    quotas = gpu_quotas(mine)
    reported: list[str] = []
    for queue in mine:
        preempts = queue["spec"].get("preemption", {})
        for field, value in NEVER.items():
            found = preempts.get(field, "Never")
            if (found.get("policy", "Never") if isinstance(found, dict) else found) != "Never":
                name = queue["metadata"]["name"]
                reported.append(f"ClusterQueue {name}: preemption.{field} is {found}: Kueue would kill workloads on its own; write {value}")
    for pool in on_cluster(pools):
        name = flavor_name(pool)
        still = leaving(pool, held)
        if quotas[name] != pool.num_gpus + still:
            beside = f" and {still} that jobs hold on drained nodes" if still else ""
            reported.append(
                f"flavor {name}: the queues' nominal quotas add up to {quotas[name]} GPUs and pool {pool.name} has {pool.num_gpus} ready"
                f"{beside}; apply `ft admin kueue` again"
            )
    known = {flavor_name(p) for p in on_cluster(pools)}
    return reported + [f"flavor {name} has a quota and no pool; delete its queues, or add the pool" for name in sorted(set(quotas) - known)]


def gpu_quotas(queues: Iterable[Manifest]) -> Counter[str]:
    """Return the GPUs in the nominal quotas of ClusterQueues, by flavor."""
    found: Counter[str] = Counter()
    for group in (group for queue in queues for group in queue["spec"].get("resourceGroups", [])):
        for flavor in group["flavors"]:
            found[flavor["name"]] += sum(_whole(r["nominalQuota"]) for r in flavor["resources"] if r["name"] == GPU_RESOURCE)
    return found


def _whole(quantity: int | str) -> int:
    """The API server writes 2000 as ``2k``."""
    text = str(quantity)
    return int(text[:-1]) * 1000 if text.endswith("k") else int(text)


def _object(kind: str, name: str, spec: Manifest, **metadata: str) -> Manifest:
    labels = {"app.kubernetes.io/part-of": "ft-platform"}
    return {"apiVersion": API, "kind": kind, "metadata": {"name": name, **metadata, "labels": labels}, "spec": spec}


def _priority(tier: str) -> Manifest:
    made = _object("WorkloadPriorityClass", priority_class(tier), {})
    del made["spec"]
    return made | {"value": PRIORITIES[tier], "description": f"Jobs of tier {tier}; nothing is preempted by it."}


def _has_fabrics(pool: Pool) -> bool:
    return any(n.fabric for n in pool.nodes)


def _topology_of(pool: Pool) -> tuple[str, tuple[str, ...]]:
    return ("ft-fabrics", (FABRIC_LABEL, HOST_LABEL)) if _has_fabrics(pool) else ("ft-nodes", (HOST_LABEL,))


def _flavor(pool: Pool) -> Manifest:
    spec = {"nodeLabels": node_selector(pool), "topologyName": _topology_of(pool)[0], "tolerations": tolerations(pool)}
    return _object("ResourceFlavor", flavor_name(pool), spec)


def _cluster_queue(pool: Pool, tier: str, gpus: int) -> Manifest:
    names = list(TIERS)
    kept = {"lendingLimit": "0"} if tier == RESERVED_FOR else {}
    amounts = pod_requests(pool, gpus)
    resources = [{"name": name, "nominalQuota": amount, **kept} for name, amount in amounts.items()]
    spec = {
        "cohortName": pool.name,
        "namespaceSelector": {
            "matchExpressions": [
                {"key": TENANT_LABEL, "operator": "Exists"},
                {"key": TIER_LABEL, "operator": "In", "values": names[names.index(tier) :]},
            ]
        },
        "queueingStrategy": "BestEffortFIFO",
        "preemption": deepcopy(NEVER),
        "resourceGroups": [{"coveredResources": list(amounts), "flavors": [{"name": flavor_name(pool), "resources": resources}]}],
    }
    return _object("ClusterQueue", queue_name(tier, pool.name), spec)


def files(platform: Platform) -> dict[str, str]:
    """Return the files by name: shared objects, each tenant's objects, and the node labels. Quotas count GPUs still held on drained
    nodes."""
    pools, held = pools_now(platform)
    try:
        shared = render(pools, held)
    except ValueError as e:
        raise Conflict(f"nothing to render: {e}", code="no_cluster") from e
    owned = [made for tenant in tenants.list_all(platform) for made in render_tenant(tenant.id, tenant.tier, pools)]
    return {"queues.yaml": objects_yaml(shared), "tenants.yaml": objects_yaml(owned), "nodes.sh": _labelling(node_labels(pools))}


def check(platform: Platform, text: str) -> list[str]:
    """Return the differences to ClusterQueues as written by ``kubectl get clusterqueues -o yaml`` or as rendered here."""
    try:
        documents = [d for d in yaml.safe_load_all(text) if d]
        queues = [item for d in documents for item in d.get("items", [d])]
        return differences(queues, *pools_now(platform))
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError) as e:
        raise InvalidRequest(
            f"these are not ClusterQueues: {str(e)[:200]}; pass the output of `kubectl get clusterqueues -o yaml`", code="invalid_cluster"
        ) from e


def pools_now(platform: Platform) -> tuple[list[Pool], Held]:
    """Return the pools, and the GPUs that jobs hold by node."""
    with platform.whole.engine.connect() as conn:
        return configured_pools.pools(platform, conn), nodes.held_gpus(conn)


def _labelling(labels_of: list[tuple[str, dict[str, str]]]) -> str:
    lines = ["#!/bin/sh -e", "# Labels that flavors and topologies look for. Nodes that come and go get theirs from their node group."]
    lines += [f"kubectl label --overwrite node {name} {' '.join(f'{k}={v}' for k, v in labels.items())}" for name, labels in labels_of]
    return "\n".join(lines) + "\n"
