"""Servers of whole models, and pools of base models, as objects of a cluster: applied when they change, deleted when nothing wants them.

A server's Deployment, or a pool's StatefulSet, owns its other objects, so deleting it deletes them. What operators applied by hand (`ft
manifest server`, `ft admin pool-manifest`) has no label :data:`KEPT` and is left alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from control_plane.adapters import manifests
from control_plane.platform.protocols import ModelServer
from core.base_models import MAX_RANK, Catalogue
from core.errors import FtError
from core.telemetry.logs import warn_once
from engine.adapters import (
    POOL_COMPONENT,
    SERVER_COMPONENT,
    AdapterPool,
    AdapterRecord,
    ClusterObject,
    ClusterSettings,
    label_selector,
    server_object_name,
    server_url,
)
from engine.adapters import pool_urls as urls_of_pool
from resources.launcher.kubernetes_api import DEPLOYMENTS, PODS, STATEFUL_SETS, KubernetesApi, Resource
from resources.launcher.kubernetes_status import STARTING

KEPT = "app.kubernetes.io/managed-by=ft-platform"
APPLIED_S = 300.0
"""Seconds after which objects are applied again, in case somebody changed or deleted one."""
COMPONENTS = {DEPLOYMENTS: SERVER_COMPONENT, STATEFUL_SETS: POOL_COMPONENT}
"""What a server or a pool is, and its component in the labels."""
WORKLOADS = {resource.kind: resource for resource in COMPONENTS}
REFUSALS = ("cluster_refused", "invalid_cluster")
"""Codes of errors that stay until something else changes."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class KubernetesServers:
    """``control_plane.platform.protocols.ModelServers`` in one namespace of a cluster. Only one process at a time may keep servers."""

    connect: Callable[[], KubernetesApi]
    """Called on first use, because the API's pods have no account on the cluster."""
    configured: Callable[[], ClusterSettings]
    """Called on first use, so that a mistake in them stops no process."""
    models: Catalogue
    max_rank: int = MAX_RANK
    """Highest rank that the servers of pools load."""
    clock: Callable[[], float] = time.monotonic
    _applied: dict[str, tuple[Sequence[ClusterObject], float]] = field(default_factory=dict, init=False)
    """By name of a Deployment or StatefulSet: its objects, and until when they count as applied."""

    @cached_property
    def api(self) -> KubernetesApi:
        return self.connect()

    @cached_property
    def settings(self) -> ClusterSettings:
        return self.configured()

    def keep(self, models: Sequence[AdapterRecord]) -> Mapping[str, ModelServer]:
        there = {
            each["metadata"]["name"]: each
            for resource, component in COMPONENTS.items()
            for each in self._list(resource, f"app.kubernetes.io/component={component}")
        }
        wanted = {server_object_name(model): model for model in models}
        found = {model.id: self._keep_model(model, there.get(name)) for name, model in wanted.items()}
        pools = {pool.name: pool for pool in self._pools()}
        for name, pool in pools.items():
            self._keep_pool(pool, there.get(name))
        is_known = len(pools) == len(self.settings.pools)
        for name, each in there.items():
            if name not in wanted and name not in pools and _is_kept(each) and (each["kind"] == DEPLOYMENTS.kind or is_known):
                self._delete(each)
                found[each["metadata"]["labels"].get("ft-platform/adapter", name)] = ModelServer(problem="its server is still ending")
        return found

    def pool_urls(self) -> Sequence[str]:
        try:
            return [url for pool in self._pools() for url in urls_of_pool(pool, self.settings)]
        except FtError as error:
            warn_once(log, f"no pools are known: {error.message}")
            return ()

    def _list(self, resource: Resource, labels: str) -> Iterator[ClusterObject]:
        """Yield objects with their kind, which the API leaves out of lists."""
        yield from ({**each, "kind": resource.kind} for each in self.api.list(resource, self.settings.namespace, labels=labels))

    def _pools(self) -> Iterator[AdapterPool]:
        """Return the pools of models that the catalogue has; as long as one is missing from it, no pool is deleted."""
        for model, size in self.settings.pools.items():
            try:
                yield manifests.pool_of(self.models.card(model), max_rank=self.max_rank, **size)
            except FtError as error:
                warn_once(log, f"pool {model} is left out: {error.message}")

    def _keep_model(self, model: AdapterRecord, there: ClusterObject | None) -> ModelServer:
        url = server_url(model, self.settings)
        if there is not None and (why := _untouched(there)):
            return ModelServer(problem=why)
        try:
            self._apply(manifests.server_objects(model, self.models.card(model.base_model), self.settings), there)
            problem = None if there is None or _is_available(there) else self._trouble(model)
        except FtError as error:
            return ModelServer(url=url if there else "", problem=error.message, refused=not there and error.code in REFUSALS)
        return ModelServer(url=url, problem=problem)

    def _keep_pool(self, pool: AdapterPool, there: ClusterObject | None) -> None:
        try:
            if there is not None and (why := _untouched(there)):
                warn_once(log, f"pool {pool.base_model} is not kept: {why}")
                return
            made = manifests.pool_objects(pool, self.settings)
            self._apply([each for each in made if each["kind"] != "InferencePool" or self.settings.gateway_namespace], there)
        except FtError as error:
            warn_once(log, f"pool {pool.base_model} cannot be kept: {error.message}")

    def _apply(self, made: Sequence[ClusterObject], there: ClusterObject | None) -> None:
        """Apply a server's objects, unless all of them were applied as they are a short while ago."""
        (workload,) = (each for each in made if each["kind"] in WORKLOADS)
        about = workload["metadata"]
        applied, until = self._applied.get(about["name"], ((), 0.0))
        if there is not None and applied == made and self.clock() < until:
            return
        owner = {"apiVersion": workload["apiVersion"], "kind": workload["kind"], "name": about["name"]}
        owner["uid"] = self.api.apply(_kept(workload))["metadata"]["uid"]
        for each in made:
            if each is not workload:
                self.api.apply(_kept(each, ownerReferences=[owner]))
        self._applied[about["name"]] = made, self.clock() + APPLIED_S

    def _delete(self, there: ClusterObject) -> None:
        """Delete a Deployment or StatefulSet, which is listed until its pods are gone."""
        name = there["metadata"]["name"]
        self._applied.pop(name, None)
        try:
            if not _is_ending(there):
                self.api.delete(WORKLOADS[there["kind"]], name, self.settings.namespace, foreground=True)
        except FtError as error:
            warn_once(log, f"{there['kind']} {name} cannot be deleted: {error.message}")

    def _trouble(self, model: AdapterRecord) -> str | None:
        """Return why a model's pods do not serve, in the cluster's words; None while they start."""
        selector = label_selector(SERVER_COMPONENT, server_object_name(model))
        pods = self.api.list(PODS, self.settings.namespace, labels=",".join(f"{key}={value}" for key, value in selector.items()))
        return next((trouble for pod in pods for trouble in _troubles(pod)), None)


def _kept(made: ClusterObject, **about: Any) -> ClusterObject:
    label, _, value = KEPT.partition("=")
    return {**made, "metadata": {**made["metadata"], **about, "labels": {**made["metadata"]["labels"], label: value}}}


def _is_kept(there: ClusterObject) -> bool:
    label, _, value = KEPT.partition("=")
    return bool(there["metadata"]["labels"].get(label) == value)


def _is_ending(there: ClusterObject) -> bool:
    return "deletionTimestamp" in there["metadata"]


def _untouched(there: ClusterObject) -> str | None:
    """Return why nothing is applied to a Deployment or StatefulSet; None if it is the platform's and not being deleted."""
    if not _is_kept(there):
        return f"{there['kind']} {there['metadata']['name']} was not applied by this platform; delete it to have the platform run it"
    return "its server is still ending" if _is_ending(there) else None


def _is_available(deployment: ClusterObject) -> bool:
    return bool(deployment.get("status", {}).get("availableReplicas"))


def _troubles(pod: ClusterObject) -> Iterator[str]:
    """Yield reasons, and no messages of containers: those are their logs, which are the operator's."""
    status = pod["status"]
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            yield f"{condition.get('reason')}: {condition.get('message')}"
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        waits, ended = (container.get("state", {}).get(key) for key in ("waiting", "terminated"))
        last = ended or container.get("lastState", {}).get("terminated")
        after = f"{container['name']} ended with {last['exitCode']} ({last.get('reason') or 'no reason'})" if last else ""
        if waits and waits.get("reason") not in (None, *STARTING):
            yield f"{container['name']}: {waits['reason']}" + (f"; {after}" if after else "")
        elif ended and ended["exitCode"] != 0:
            yield after
