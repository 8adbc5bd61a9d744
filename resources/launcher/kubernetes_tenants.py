"""What a tenant has in the cluster: a namespace with its queues, a quota, a network that is closed but for what an agent needs, and
bindings that give the platform's accounts their rights in it.

The worker keeps it as the tenants and the pools are; deleting a tenant's data deletes the namespace, and the next round makes an empty one.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

from control_plane.billing.metering.rounds import Round
from control_plane.capacity import kueue
from control_plane.platform.protocols import Search
from control_plane.tenants.rules import TIERS, Tenant
from core.errors import Unavailable
from core.retries import RetryPolicy, with_retries
from engine.adapters import ClusterObject
from engine.scheduler import Pool
from resources.launcher.kubernetes_api import CONFIG_MAPS, JOBS, NAMESPACES, ROLE_BINDINGS, SECRETS, KubernetesApi, Outdated
from resources.launcher.kubernetes_manifests import WORKLOAD

SHAPE = "ft-platform/shape"
"""Annotation of a namespace: digest of what was applied with it."""
POLL_S = 0.5
BOUND_RETRIES = RetryPolicy(first_s=0.1, most_s=0.4, give_up_s=3.0)
"""For what needs a binding that was just applied: API servers learn of bindings through watches."""
RBAC = "rbac.authorization.k8s.io"
PARTS = {"app.kubernetes.io/part-of": "ft-platform"}
PRIVATE = ("10.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7", "fe80::/10")
DNS: ClusterObject = {
    "ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")],
    "to": [{"namespaceSelector": {}}, *({"ipBlock": {"cidr": network}} for network in PRIVATE)],
}
"""Any pod, and private addresses, as in the chart's policies: no policy can select a cache on the node (NodeLocal DNSCache)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reachable:
    """Where agents connect to, besides the pods of their own gang."""

    namespace: str
    """The platform's own."""
    api_port: int
    """Port of the API's pods."""
    store_networks: tuple[str, ...]
    """Networks of the object store."""
    store_port: int


def render(tenant: str, tier: str, pools: Sequence[Pool], reachable: Reachable) -> list[ClusterObject]:
    """Return a tenant's objects, the namespace first."""
    own = [pool for pool in kueue.on_cluster(pools) if any(pool.widest(each) for each in _tiers(tier))]
    return [*kueue.render_tenant(tenant, tier, pools), _quota(tenant, own), _network(tenant, reachable)]


def bindings(tenant: str, accounts: Sequence[str], *, namespace: str) -> list[ClusterObject]:
    """Return what gives each of the platform's `accounts` the ClusterRole of its own name in a tenant's namespace.

    A finalizer keeps them in a namespace that is being deleted, because without them no account could remove the finalizers of its Jobs.
    """
    return [
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": name, "namespace": kueue.namespace(tenant), "labels": PARTS, "finalizers": [WORKLOAD]},
            "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
        }
        for name in accounts
    ]


def _tiers(tier: str) -> Sequence[str]:
    names = list(TIERS)
    return names[: names.index(tier) + 1]


def _quota(tenant: str, pools: Sequence[Pool]) -> ClusterObject:
    """Return the quota: every GPU that the tenant may ever get, a pod for each, and nothing that is reached from outside or stays."""
    gpus = str(sum(pool.total_gpus for pool in pools))
    hard = {"pods": gpus, f"requests.{kueue.GPU_RESOURCE}": gpus, "services": "0", "persistentvolumeclaims": "0"}
    return _object("ResourceQuota", "v1", tenant, {"hard": hard})


def _network(tenant: str, reachable: Reachable) -> ClusterObject:
    """Return the policy of all pods: nothing comes in, and only DNS, the object store and the platform's API can be reached."""
    api = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": reachable.namespace}}}
    egress = [DNS, {"to": [api], "ports": [{"protocol": "TCP", "port": reachable.api_port}]}]
    if reachable.store_networks:
        blocks = [{"ipBlock": {"cidr": network}} for network in reachable.store_networks]
        egress.append({"to": blocks, "ports": [{"protocol": "TCP", "port": reachable.store_port}]})
    return _object(
        "NetworkPolicy", "networking.k8s.io/v1", tenant, {"podSelector": {}, "policyTypes": ["Ingress", "Egress"], "egress": egress}
    )


def _object(kind: str, api_version: str, tenant: str, spec: ClusterObject) -> ClusterObject:
    metadata = {"name": "ft-platform", "namespace": kueue.namespace(tenant), "labels": PARTS}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec}


@dataclass(frozen=True, kw_only=True)
class TenantNamespaces:
    """The tenants' objects in one cluster, and, as :class:`~control_plane.platform.protocols.TenantRecords`, what it records of them."""

    name: ClassVar[str] = "kubernetes"
    connect: Callable[[], KubernetesApi]
    reachable: Reachable
    accounts: tuple[str, ...] = ()
    """Service accounts of the platform that need rights in the tenants' namespaces."""

    @cached_property
    def api(self) -> KubernetesApi:
        return self.connect()

    def keep(self, tenants: Sequence[Tenant], pools: Sequence[Pool]) -> int:
        """Apply the objects of tenants whose shape has changed; returns how many. One tenant's failure is raised after the others are done.
        Rows of tenants are never deleted, so a namespace without one is not this platform's to delete."""
        found = {space["metadata"]["name"]: space for space in self.api.list(NAMESPACES, labels=kueue.TENANT_LABEL)}
        changed = 0
        with Round("namespaces of tenants") as each:
            for tenant in tenants:
                with each(tenant.id):
                    changed += self._keep(tenant, pools, found.get(kueue.namespace(tenant.id)))
        return changed

    def erase(self, tenant: str, ids: Collection[str], *, budget_s: float) -> Mapping[str, int]:  # noqa: ARG002  # all is in its namespace
        """Delete the tenant's namespace with all that is in it, and the marks of its workloads' names."""
        space, until = kueue.namespace(tenant), time.monotonic() + budget_s
        found = self.api.get(NAMESPACES, space)
        removed = int(found is not None)
        if found is not None:
            self._remove(space)
        while found is not None and not self._release(space) and time.monotonic() < until:
            time.sleep(POLL_S)
        marks = self._marks(tenant)
        for mark in marks:
            self.api.delete(CONFIG_MAPS, mark["metadata"]["name"], self.reachable.namespace)
        return {"namespaces": removed, "workload names": len(marks)}

    def search(self, tenant: str, ids: Collection[str]) -> Search:  # noqa: ARG002  # all is in its namespace
        """Look for the tenant's Jobs and Secrets, and for the marks of its workloads' names. Its namespace may be there, empty."""
        space = kueue.namespace(tenant)
        exists = self.api.get(NAMESPACES, space) is not None  # outside of it, Secrets may not be listed
        found = [
            f"{resource.plural}/{each['metadata']['name']}"
            for resource in ((JOBS, SECRETS) if exists else ())
            for each in self.api.list(resource, space, labels=WORKLOAD)
        ]
        marks = [f"configmaps/{mark['metadata']['name']}" for mark in self._marks(tenant)]
        searched = [f"jobs and secrets in namespace {space}", f"configmaps in namespace {self.reachable.namespace}"]
        return Search(store="kubernetes", searched=searched, found=[*found, *marks])

    def _keep(self, tenant: Tenant, pools: Sequence[Pool], space: ClusterObject | None) -> int:
        own, *others = render(tenant.id, tenant.tier, pools, self.reachable)
        first = [own, *bindings(tenant.id, self.accounts, namespace=self.reachable.namespace)]
        shape = hashlib.sha256(json.dumps([*first, *others], sort_keys=True).encode()).hexdigest()[:16]
        if space is not None and "deletionTimestamp" in space["metadata"]:
            self._release(kueue.namespace(tenant.id))
            return 0
        if space is not None and space["metadata"].get("annotations", {}).get(SHAPE) == shape:
            return 0
        for manifest in first:
            self.api.apply(manifest)
        for manifest in others:
            with_retries(partial(self.api.apply, manifest), BOUND_RETRIES)
        self.api.patch(NAMESPACES, kueue.namespace(tenant.id), "", {"metadata": {"annotations": {SHAPE: shape}}})  # last: all was applied
        return 1

    def _remove(self, namespace: str) -> None:
        """Delete a namespace; the finalizers of its Jobs are removed, because there is nobody left to read how they ended."""
        self.api.delete(NAMESPACES, namespace)
        for job in self.api.list(JOBS, namespace, labels=WORKLOAD):
            about = job["metadata"]
            kept = [finalizer for finalizer in about.get("finalizers", ()) if finalizer != WORKLOAD]
            try:
                self.api.patch(
                    JOBS, about["name"], namespace, {"metadata": {"resourceVersion": about["resourceVersion"], "finalizers": kept}}
                )
            except Outdated as error:
                raise Unavailable(f"{about['name']} has changed; the next round goes on: {error.message}") from error

    def _release(self, namespace: str) -> bool:
        """Let the bindings of a namespace that is being deleted go, unless it still holds Jobs; returns whether it did."""
        if self.api.list(JOBS, namespace, labels=WORKLOAD):
            return False
        for name in self.accounts:
            self.api.patch(ROLE_BINDINGS, name, namespace, {"metadata": {"finalizers": None}})
        return True

    def _marks(self, tenant: str) -> list[ClusterObject]:
        return self.api.list(CONFIG_MAPS, self.reachable.namespace, labels=f"{WORKLOAD},{kueue.TENANT_LABEL}={tenant}")
