"""The Kubernetes API as dictionaries: requests through the official client, and a cache that watches keep current."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import urllib3
from kubernetes import config
from kubernetes.client import ApiClient, Configuration
from kubernetes.client.exceptions import ApiException
from kubernetes.informer import ADDED, DELETED, ERROR, MODIFIED, SharedInformer

from control_plane.capacity import kueue
from core.errors import Conflict, FtError, Unavailable
from engine.adapters import POOL_GROUP, ClusterObject

TIMEOUT_S = (5.0, 30.0)
"""Seconds to connect, and between two bytes."""
WATCH_S = 300
"""Seconds after which a watch is closed and everything listed again: a connection that died unnoticed hides changes no longer."""
PAUSE_S = 1.0
"""Seconds between two tries to watch."""
MERGE, APPLY = "application/merge-patch+json", "application/apply-patch+yaml"
OWNER = "ft-platform"
"""Field manager of what is applied."""


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object and where the API serves it."""

    kind: str
    api_version: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str = "", name: str = "") -> str:
        root = f"/api/{self.api_version}" if "/" not in self.api_version else f"/apis/{self.api_version}"
        scope = f"/namespaces/{namespace}" if namespace and self.namespaced else ""
        return "/".join([f"{root}{scope}", self.plural, *([name] if name else [])])


JOBS = Resource("Job", "batch/v1", "jobs")
PODS = Resource("Pod", "v1", "pods")
SECRETS = Resource("Secret", "v1", "secrets")
CONFIG_MAPS = Resource("ConfigMap", "v1", "configmaps")
NAMESPACES = Resource("Namespace", "v1", "namespaces", namespaced=False)
NODES = Resource("Node", "v1", "nodes", namespaced=False)
RESOURCE_QUOTAS = Resource("ResourceQuota", "v1", "resourcequotas")
NETWORK_POLICIES = Resource("NetworkPolicy", "networking.k8s.io/v1", "networkpolicies")
ROLE_BINDINGS = Resource("RoleBinding", "rbac.authorization.k8s.io/v1", "rolebindings")
LOCAL_QUEUES = Resource("LocalQueue", kueue.API, "localqueues")
WORKLOADS = Resource("Workload", kueue.API, "workloads")
CLUSTER_QUEUES = Resource("ClusterQueue", kueue.API, "clusterqueues", namespaced=False)
COHORTS = Resource("Cohort", kueue.API, "cohorts", namespaced=False)
RESOURCE_FLAVORS = Resource("ResourceFlavor", kueue.API, "resourceflavors", namespaced=False)
TOPOLOGIES = Resource("Topology", kueue.API, "topologies", namespaced=False)
PRIORITY_CLASSES = Resource("WorkloadPriorityClass", kueue.API, "workloadpriorityclasses", namespaced=False)
DEPLOYMENTS = Resource("Deployment", "apps/v1", "deployments")
STATEFUL_SETS = Resource("StatefulSet", "apps/v1", "statefulsets")
SERVICES = Resource("Service", "v1", "services")
INFERENCE_POOLS = Resource("InferencePool", f"{POOL_GROUP}/v1", "inferencepools")
BY_KIND: Mapping[str, Resource] = {
    each.kind: each
    for each in (
        JOBS, PODS, SECRETS, CONFIG_MAPS, NAMESPACES, RESOURCE_QUOTAS, NETWORK_POLICIES, ROLE_BINDINGS, LOCAL_QUEUES, WORKLOADS,
        CLUSTER_QUEUES, COHORTS, RESOURCE_FLAVORS, TOPOLOGIES, PRIORITY_CLASSES, DEPLOYMENTS, STATEFUL_SETS, SERVICES, INFERENCE_POOLS,
    )
}  # fmt: skip


class Exists(Conflict):
    """An object of that name is there already."""


class Outdated(Conflict):
    """The object has changed since it was read."""


class Forbidden(Unavailable):
    """The account has no right to the request, or not yet."""


class KubernetesApi:
    """Requests to one cluster. ``Unavailable`` if it does not answer or forbids the request, because a tenant's namespace gets its rights a
    moment after it is created; ``Conflict`` (``cluster_refused``) if it refuses an object."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    @classmethod
    def from_environment(cls) -> KubernetesApi:
        """Return the API of the current context of ``KUBECONFIG``, or else of the cluster that this process runs in."""
        settings = Configuration()
        try:
            if file := os.environ.get("KUBECONFIG"):
                config.load_kube_config(config_file=file, client_configuration=settings)
            else:
                config.load_incluster_config(client_configuration=settings)
        except config.ConfigException as error:
            raise Conflict(f"no Kubernetes cluster is configured ({error}); run in a pod, or set KUBECONFIG", code="no_cluster") from error
        return cls(ApiClient(settings))

    def about(self, path: str) -> tuple[ClusterObject, str] | None:
        """Return what the server says of itself, at ``/version`` or a group's path, with the ``Date`` of the answer; None if there is
        nothing."""
        try:
            answer = self._request("GET", path)
        except _Missing:
            return None
        return answer.json(), answer.headers["date"]

    def get(self, resource: Resource, name: str, namespace: str = "") -> ClusterObject | None:
        """Return an object; None if there is none."""
        try:
            found: ClusterObject = self._request("GET", resource.path(namespace, name)).json()
            return found
        except _Missing:
            return None

    def list(self, resource: Resource, namespace: str = "", *, labels: str) -> list[ClusterObject]:
        """Return the objects that the selector `labels` matches, of all namespaces by default."""
        return list(self._request("GET", resource.path(namespace), {"labelSelector": labels}).json()["items"])

    def create(self, manifest: ClusterObject) -> ClusterObject:
        """Create an object; :class:`Exists` if its name is taken, ``Unavailable`` while its namespace does not exist."""
        resource, namespace = _of(manifest)
        try:
            made: ClusterObject = self._request("POST", resource.path(namespace), body=manifest).json()
            return made
        except _Missing as error:
            raise Unavailable(f"namespace {namespace} does not exist yet: {error.message}", code="cluster_unavailable") from error

    def apply(self, manifest: ClusterObject) -> ClusterObject:
        """Create an object or change it, so that it has the fields of `manifest`; returns it as it is then."""
        resource, namespace = _of(manifest)
        path = resource.path(namespace, manifest["metadata"]["name"])
        made: ClusterObject = self._request("PATCH", path, {"fieldManager": OWNER, "force": "true"}, manifest, APPLY).json()
        return made

    def patch(self, resource: Resource, name: str, namespace: str, changes: ClusterObject) -> bool:
        """Merge `changes` into an object; returns whether there is one. :class:`Outdated` if they name another resource version."""
        try:
            self._request("PATCH", resource.path(namespace, name), body=changes, content_type=MERGE)
        except _Missing:
            return False
        return True

    def delete(
        self, resource: Resource, name: str, namespace: str = "", *, grace_s: float | None = None, foreground: bool = False
    ) -> None:  # fmt: skip
        """Delete an object, and then what it owns, with `foreground` in the other order; nothing if there is none."""
        asked = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground" if foreground else "Background"}
        try:
            self._request(
                "DELETE", resource.path(namespace, name), body=asked | ({} if grace_s is None else {"gracePeriodSeconds": int(grace_s)})
            )
        except _Missing:
            return

    def listing(self, resource: Resource, *, labels: str, watched: Callable[[], None]) -> Callable[..., Any]:
        """Return what an informer lists and watches `resource` with; `watched` is called when a watch, which follows a list, has begun."""

        def objects(*, watch: bool = False, resource_version: str = "", timeout_seconds: int = 0, **_: Any) -> Any:
            """:rtype: object"""
            asked, timeout = {"labelSelector": labels}, TIMEOUT_S
            if watch:
                asked |= {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": resource_version}
                asked["timeoutSeconds"], timeout = str(timeout_seconds), (TIMEOUT_S[0], timeout_seconds + TIMEOUT_S[1])
            try:
                answer = self._request("GET", resource.path(), asked, timeout=timeout)
            except _Gone as error:
                raise ApiException(status=410, reason=error.message) from error  # as the informer knows it
            if watch:
                watched()
                return answer
            found = answer.json()
            return SimpleNamespace(items=found["items"], metadata=SimpleNamespace(resource_version=found["metadata"]["resourceVersion"]))

        return objects

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: ClusterObject | None = None,
        content_type: str = "application/json",
        timeout: tuple[float, float] = TIMEOUT_S,
    ) -> urllib3.HTTPResponse:
        try:
            answer: urllib3.HTTPResponse = self._client.call_api(
                path, method, query_params=[*(query or {}).items()], body=body, auth_settings=["BearerToken"],
                header_params={"Content-Type": content_type, "Accept": "application/json"}, _preload_content=False,
                _request_timeout=timeout,
            )  # fmt: skip
            if not (query and query.get("watch")):
                answer.read(cache_content=True)
                answer.release_conn()
        except ApiException as error:
            raise _error(error.status or 0, error.body or "", f"{method} {path}") from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Unavailable(f"the Kubernetes API did not answer ({type(error).__name__})", code="cluster_unavailable") from error
        return answer


class _Missing(FtError):
    """There is no such object, or no such namespace."""

    default_code = "cluster_object_missing"


class _Gone(Unavailable):
    """The resource version to watch from is too old."""


def _error(status: int, text: str, what: str) -> FtError:
    try:
        body = json.loads(text)
        reason, said = str(body["reason"]), str(body["message"])
    except (ValueError, KeyError, TypeError):
        reason, said = "", text[:200]
    message = f"{what}: {said} ({status})"
    if status == 404:
        return _Missing(message)
    if status == 409:
        return Exists(message) if reason == "AlreadyExists" else Outdated(message)
    if status == 410:
        return _Gone(message, code="cluster_unavailable")
    if status in (401, 403):
        return Forbidden(message, code="cluster_unavailable")
    if status in (400, 405, 413, 422):
        return Conflict(message, code="cluster_refused")
    return Unavailable(message, code="cluster_unavailable")


def _of(manifest: ClusterObject) -> tuple[Resource, str]:
    return BY_KIND[manifest["kind"]], manifest["metadata"].get("namespace", "")


class Cache:
    """The objects of one kind as watches report them."""

    def __init__(
        self,
        api: KubernetesApi,
        resource: Resource,
        *,
        labels: str,
        key: Callable[[ClusterObject], str],
        group: Callable[[ClusterObject], str] | None = None,
        seen: Callable[[ClusterObject], None] | None = None,
    ) -> None:
        self._current, self._closing = threading.Event(), threading.Event()
        self._key, self._group, self._groups = key, group, dict[str, dict[str, ClusterObject]]()
        listing = api.listing(resource, labels=labels, watched=self._current.set)
        self._informer = SharedInformer(listing, resync_period=WATCH_S, key_func=key)
        self._informer.add_event_handler(ERROR, self._failed)
        for event in (ADDED, MODIFIED):
            for handler in filter(None, (group and self._join, seen)):
                self._informer.add_event_handler(event, handler)
        if group:
            self._informer.add_event_handler(DELETED, self._leave)

    def start(self) -> None:
        self._informer.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the cache holds what the cluster does; False if it does not in time."""
        return self._current.wait(timeout_s)

    @property
    def is_current(self) -> bool:
        """Whether changes arrive; otherwise it may hold what is long gone."""
        return self._current.is_set()

    def get(self, key: str) -> ClusterObject | None:
        found: ClusterObject | None = self._informer.cache.get_by_key(key)
        return found

    def group(self, name: str) -> list[ClusterObject]:
        """Return the objects of which `group` returns this name."""
        return list(self._groups.get(name, {}).values())

    def __iter__(self) -> Iterator[ClusterObject]:
        return iter(self._informer.cache.list())

    def close(self) -> None:
        self._closing.set()
        self._informer.stop()

    def _join(self, found: ClusterObject) -> None:
        assert self._group is not None
        self._groups.setdefault(self._group(found), {})[self._key(found)] = found

    def _leave(self, gone: ClusterObject) -> None:
        assert self._group is not None
        left = self._groups.get(name := self._group(gone), {})
        left.pop(self._key(gone), None)
        if not left:
            self._groups.pop(name, None)

    def _failed(self, _error: object) -> None:
        """Wait before the informer, which has logged the error, tries again; called by its thread."""
        self._current.clear()
        self._closing.wait(PAUSE_S)
