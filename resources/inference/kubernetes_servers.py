"""Servers of whole models, and pools of base models, as objects of a cluster: applied when they change, deleted when nothing wants them.

A server's Deployment, or a pool's StatefulSet, owns its other objects, so deleting it deletes them. What operators applied by hand (`ft
manifest server`, `ft admin pool-manifest`) has no label :data:`KEPT` and is left alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from control_plane.adapters import manifests
from control_plane.platform.protocols import ModelServer
from ft_assets.adapters import cluster, llm_d, servers
from ft_assets.adapters.cluster import ClusterSettings, Manifest
from ft_assets.adapters.llm_d import Pool
from ft_assets.adapters.record import AdapterRecord
from ft_assets.base_models import Catalogue
from ft_assets.errors import FtError, Unavailable
from resources.launcher.kubernetes_api import DEPLOYMENTS, PODS, STATEFUL_SETS, KubernetesApi, Resource
from resources.launcher.kubernetes_status import STARTING

KEPT = "app.kubernetes.io/managed-by=ft-platform"
SHAPE = "ft-platform/shape"
"""Annotation of a Deployment or StatefulSet: digest of what was applied with it."""
WORKLOADS = {resource.kind: resource for resource in (DEPLOYMENTS, STATEFUL_SETS)}
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class KubernetesServers:
    """``control_plane.platform.protocols.ModelServers`` in one namespace of a cluster."""

    connect: Callable[[], KubernetesApi]
    """Called on first use, because the API's pods have no account on the cluster."""
    settings: ClusterSettings
    models: Catalogue

    @cached_property
    def api(self) -> KubernetesApi:
        return self.connect()

    def keep(self, models: Sequence[AdapterRecord]) -> Mapping[str, ModelServer]:
        there = {
            each["metadata"]["name"]: (resource, each)
            for resource in WORKLOADS.values()
            for each in self.api.list(resource, self.settings.namespace, labels=KEPT)
        }
        wanted = {servers.object_name(model): model for model in models}
        found = {model.id: self._keep_model(model, there.get(name)) for name, model in wanted.items()}
        pools = {pool.name: pool for pool in self._pools()}
        for name, pool in pools.items():
            self._keep_pool(pool, there.get(name))
        is_known = len(pools) == len(self.settings.pools)
        for name, (resource, _) in there.items():
            if name not in wanted and name not in pools and (resource is DEPLOYMENTS or is_known):
                self.api.delete(resource, name, self.settings.namespace)
        return found

    def pool_urls(self) -> Sequence[str]:
        return [url for pool in self._pools() for url in llm_d.urls(pool, self.settings)]

    def _pools(self) -> Iterator[Pool]:
        """Return the pools of models that the catalogue has; as long as one is missing from it, no pool is deleted."""
        for model, size in self.settings.pools.items():
            try:
                yield manifests.pool_of(self.models.card(model), **size)
            except FtError as error:
                _warn_once(f"pool {model} is left out: {error.message}")

    def _keep_model(self, model: AdapterRecord, there: tuple[Resource, Manifest] | None) -> ModelServer:
        url = servers.url(model, self.settings)
        try:
            self._apply(manifests.server_objects(model, self.models.card(model.base_model), self.settings), there)
        except FtError as error:
            return ModelServer(url=url if there else "", problem=error.message, refused=not (there or isinstance(error, Unavailable)))
        return ModelServer(url=url, problem=None if there is None or _is_available(there[1]) else self._trouble(model))

    def _keep_pool(self, pool: Pool, there: tuple[Resource, Manifest] | None) -> None:
        try:
            made = manifests.pool_objects(pool, self.settings)
            self._apply([each for each in made if each["kind"] != "InferencePool" or self.settings.gateway_namespace], there)
        except FtError as error:
            _warn_once(f"pool {pool.base_model} cannot be kept: {error.message}")

    def _apply(self, made: Sequence[Manifest], there: tuple[Resource, Manifest] | None) -> None:
        """Apply a server's objects unless they are applied; the mark that all of them are is set last."""
        (workload,) = (each for each in made if each["kind"] in WORKLOADS)
        shape = hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:16]
        if there is not None and there[1]["metadata"].get("annotations", {}).get(SHAPE) == shape:
            return
        about = workload["metadata"]
        owner = {"apiVersion": workload["apiVersion"], "kind": workload["kind"], "name": about["name"]}
        owner["uid"] = self.api.apply(_kept(workload))["metadata"]["uid"]
        for each in made:
            if each is not workload:
                self.api.apply(_kept(each, ownerReferences=[owner]))
        self.api.patch(WORKLOADS[workload["kind"]], about["name"], about["namespace"], {"metadata": {"annotations": {SHAPE: shape}}})

    def _trouble(self, model: AdapterRecord) -> str | None:
        """Return why a model's pods do not serve, in the cluster's words; None while they start."""
        selector = cluster.selector(servers.COMPONENT, servers.object_name(model))
        pods = self.api.list(PODS, self.settings.namespace, labels=",".join(f"{key}={value}" for key, value in selector.items()))
        return next((trouble for pod in pods for trouble in _troubles(pod)), None)


@cache
def _warn_once(message: str) -> None:
    """Log what every pass finds."""
    log.warning("%s", message)


def _kept(made: Manifest, **about: Any) -> Manifest:
    label, _, value = KEPT.partition("=")
    return {**made, "metadata": {**made["metadata"], **about, "labels": {**made["metadata"]["labels"], label: value}}}


def _is_available(deployment: Manifest) -> bool:
    return bool(deployment.get("status", {}).get("availableReplicas"))


def _troubles(pod: Manifest) -> Iterator[str]:
    status = pod["status"]
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            yield f"{condition.get('reason')}: {condition.get('message')}"
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        waits, ended = (container.get("state", {}).get(key) for key in ("waiting", "terminated"))
        last = ended or container.get("lastState", {}).get("terminated") or {}
        if waits and waits.get("reason") not in (None, *STARTING):
            yield f"{container['name']}: {waits['reason']}: {last.get('message') or waits.get('message')}"
        elif ended and ended["exitCode"] != 0:
            yield f"{container['name']} ended with {ended['exitCode']}: {ended.get('message') or ended.get('reason')}"
