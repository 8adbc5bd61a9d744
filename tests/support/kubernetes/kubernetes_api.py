"""An API server of Kubernetes, as far as the platform uses one: objects over HTTP with resource versions, finalizers, owners and watches.

It knows nothing of the platform. :mod:`.kubernetes_nodes` adds the controllers and the nodes that act on the objects.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kubernetes.client import ApiClient, Configuration

Object = dict[str, Any]
Key = tuple[str, str, str]
"""Plural, namespace, name."""
ADMINISTRATOR = "the-administrator"
"""Account that may do everything."""
RBAC = "rbac.authorization.k8s.io"
BOOKMARK_S = 0.2
NAMESPACED = {
    "Job": ("batch/v1", "jobs"), "Pod": ("v1", "pods"), "Secret": ("v1", "secrets"), "ConfigMap": ("v1", "configmaps"),
    "ResourceQuota": ("v1", "resourcequotas"), "NetworkPolicy": ("networking.k8s.io/v1", "networkpolicies"),
    "RoleBinding": (f"{RBAC}/v1", "rolebindings"),
    "LocalQueue": ("kueue.x-k8s.io/v1beta2", "localqueues"), "Workload": ("kueue.x-k8s.io/v1beta2", "workloads"),
    "Deployment": ("apps/v1", "deployments"), "StatefulSet": ("apps/v1", "statefulsets"), "Service": ("v1", "services"),
    "InferencePool": ("inference.networking.k8s.io/v1", "inferencepools"),
}  # fmt: skip
PLURALS = {
    "Namespace": "namespaces", "Node": "nodes", "ClusterQueue": "clusterqueues", "Cohort": "cohorts", "ResourceFlavor": "resourceflavors",
    "Topology": "topologies", "WorkloadPriorityClass": "workloadpriorityclasses",
    **{kind: plural for kind, (_, plural) in NAMESPACED.items()},
}  # fmt: skip
APPLY = "application/apply-patch+yaml"
FREE_OF_A_JOB = frozenset({"suspend", "parallelism", "activeDeadlineSeconds", "backoffLimit"})
"""Fields of a Job's spec that may change."""


@dataclass(frozen=True, slots=True)
class Action:
    """What a request does, as authorization looks at it."""

    verb: str
    group: str
    resource: str
    namespace: str = ""
    name: str = ""


def token_of(account: str) -> str:
    return f"token-of-{account}"


class Refused(Exception):
    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


def timestamp(at: float | None = None) -> str:
    return datetime.fromtimestamp(time.time() if at is None else at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Cluster:
    """The stored objects. Every change is an event, and then the controllers act until nothing changes any more."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    objects: dict[Key, Object] = field(default_factory=dict)
    events: list[tuple[int, str, str, Object]] = field(default_factory=list)
    version: int = 1
    compacted: int = 0
    """Watches that begin before this version are refused."""
    controllers: list[Callable[[], None]] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Methods and paths with queries."""
    faults: list[Callable[[str, str], str | None]] = field(default_factory=list)
    """Called with method and path: ``before`` breaks the connection instead of an answer, ``after`` does once the request took effect. One
    that raises :class:`Refused` has the request answered so."""
    watches: int = 0
    """Number of open watches."""
    generation: int = 0
    """Watches of earlier ones end."""
    permits: Callable[[str, Action], bool] = lambda _account, _action: False
    """Whether an account other than the administrator may do something."""
    about: dict[str, Object] = field(default_factory=dict)
    """What the server says of itself, by path; every account may ask."""
    ahead_s: float = 0.0
    """How far the server's clock is ahead of this machine's."""
    unserved: Collection[str] = ()
    """Plurals whose definitions are not installed."""
    deleting: Callable[[Object, int], bool] = lambda _object, _grace: True
    """Whether an object may go at once; nodes end pods first."""

    def __post_init__(self) -> None:
        self.changed = threading.Condition(self.lock)

    def find(self, plural: str, namespace: str = "", selector: str = "") -> list[Object]:
        return [
            found for (kind, space, _), found in sorted(self.objects.items())
            if kind == plural and namespace in ("", space) and matches(found, selector)
        ]  # fmt: skip

    def read(self, key: Key) -> Object:
        if key not in self.objects:
            raise Refused(404, "NotFound", f'{key[0]} "{key[2]}" not found')
        return self.objects[key]

    def create(self, plural: str, namespace: str, made: Object) -> Object:
        key = (plural, namespace, made["metadata"]["name"])
        space = self.objects.get(("namespaces", "", namespace))
        if namespace and space is None:
            raise Refused(404, "NotFound", f'namespaces "{namespace}" not found')
        if space is not None and "deletionTimestamp" in space["metadata"]:
            raise Refused(403, "Forbidden", f'unable to create new content in namespace "{namespace}": it is being terminated')
        if key in self.objects:
            raise Refused(409, "AlreadyExists", f'{plural} "{key[2]}" already exists')
        if PLURALS.get(made["kind"]) != plural:
            raise Refused(400, "BadRequest", f"{made['kind']} is not among {plural}")
        about = {"uid": str(uuid.uuid4()), "creationTimestamp": timestamp()} | ({"namespace": namespace} if namespace else {})
        return self.store(key, {"status": {}, **deepcopy(made), "metadata": deepcopy(made["metadata"]) | about}, "ADDED")

    def merge(self, key: Key, changes: Object) -> Object:
        """Apply a JSON merge patch."""
        before = self.read(key)
        expected = changes.get("metadata", {}).get("resourceVersion")
        if expected not in (None, before["metadata"]["resourceVersion"]):
            raise Refused(409, "Conflict", "the object has been modified; please apply your changes to the latest version and try again")
        after = merged(before, changes)
        if before.get("immutable") and after.get("data") != before.get("data"):
            raise Refused(422, "Invalid", "data is immutable")
        if key[0] == "jobs":
            held = [
                name for name in {*before["spec"], *after["spec"]} - FREE_OF_A_JOB if before["spec"].get(name) != after["spec"].get(name)
            ]
            if held:
                raise Refused(422, "Invalid", f"spec.{held[0]}: field is immutable")
        return self.update(key, after)

    def apply(self, plural: str, namespace: str, name: str, made: Object) -> Object:
        """Apply as the only manager of the object: what it does not name any more is gone."""
        key = (plural, namespace, name)
        if key not in self.objects:
            return self.create(plural, namespace, made)
        before, owned = self.objects[key], ("labels", "annotations")
        kept = {k: v for k, v in before["metadata"].items() if k not in owned} | {k: v for k, v in made["metadata"].items() if k in owned}
        return self.update(key, {**before, **deepcopy(made), "metadata": kept})

    def update(self, key: Key, after: Object) -> Object:
        if after == self.objects[key]:
            return after
        if "deletionTimestamp" in after["metadata"] and not after["metadata"].get("finalizers") and self.deleting(after, -1):
            return self.remove(key, after)
        return self.store(key, after, "MODIFIED")

    def delete(self, key: Key, grace_s: int | None = None) -> Object:
        found = deepcopy(self.read(key))
        about = found["metadata"]
        if grace_s is None:
            grace_s = int(found["spec"].get("terminationGracePeriodSeconds", 30)) if key[0] == "pods" else 0
        until = timestamp(time.time() + grace_s)
        about["deletionTimestamp"] = min(about.get("deletionTimestamp", until), until)
        about["deletionGracePeriodSeconds"] = min(about.get("deletionGracePeriodSeconds", grace_s), grace_s)
        self.store(key, found, "MODIFIED")
        if key[0] == "namespaces":
            return found  # it goes when it is empty
        if key in self.objects and self.deleting(self.objects[key], grace_s) and not about.get("finalizers"):
            return self.remove(key, self.objects[key])
        return found

    def store(self, key: Key, found: Object, event: str) -> Object:
        self.version += 1
        self.objects[key] = {**found, "metadata": {**found["metadata"], "resourceVersion": str(self.version)}}
        return self._happened(event, key, self.objects[key])

    def remove(self, key: Key, found: Object) -> Object:
        if key in self.objects:
            self.version += 1
            del self.objects[key]
            self._happened("DELETED", key, {**found, "metadata": {**found["metadata"], "resourceVersion": str(self.version)}})
        return found

    def _happened(self, event: str, key: Key, found: Object) -> Object:
        with self.changed:
            self.events.append((self.version, event, key[0], deepcopy(found)))
            self.changed.notify_all()
        return found

    def settle(self) -> None:
        """Have the controllers act until nothing changes."""
        with self.lock:
            before = -1
            while before != self.version:
                before = self.version
                self._collect()
                for controller in self.controllers:
                    controller()

    def _collect(self) -> None:
        """Delete what belongs to an owner that is gone, and what is in a namespace that is being deleted."""
        uids = {found["metadata"]["uid"] for found in self.objects.values()}
        for key, found in [*self.objects.items()]:
            owners = found["metadata"].get("ownerReferences", ())
            space = self.objects.get(("namespaces", "", key[1]), {"metadata": {}})
            orphaned = owners and not any(owner["uid"] in uids for owner in owners)
            if (
                (orphaned or "deletionTimestamp" in space["metadata"])
                and "deletionTimestamp" not in found["metadata"]
                and key in self.objects
            ):
                self.delete(key)
        for key in [key for key, found in self.objects.items() if key[0] == "namespaces" and "deletionTimestamp" in found["metadata"]]:
            if not any(space == key[2] for _, space, _ in self.objects):
                self.remove(key, self.objects[key])

    def compact(self) -> None:
        """Forget the past: no watch can begin before now."""
        with self.lock:
            self.version += 1
            self.compacted = self.version

    def break_watches(self) -> None:
        with self.lock:
            self.generation += 1
            self.changed.notify_all()


def merged(before: Any, changes: Any) -> Any:
    if not isinstance(changes, dict) or not isinstance(before, dict):
        return deepcopy(changes)
    kept = {key: value for key, value in before.items() if key not in changes}
    return kept | {key: merged(before.get(key, {}), value) for key, value in changes.items() if value is not None}


def matches(found: Object, selector: str) -> bool:
    labels = found["metadata"].get("labels") or {}
    for part in filter(None, selector.split(",")):
        name, equals, value = part.partition("=")
        if equals and labels.get(name) != value:
            return False
        if not equals and (name.lstrip("!") in labels) is name.startswith("!"):
            return False
    return True


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cluster: Cluster

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def do_PATCH(self) -> None:
        self.answer()

    def do_DELETE(self) -> None:
        self.answer()

    def answer(self) -> None:
        url = urlsplit(self.path)
        query, body = dict(parse_qsl(url.query)), self.rfile.read(int(self.headers.get("content-length") or 0))
        self.cluster.requests.append((self.command, self.path))
        fault = None
        try:
            fault = next((found for each in self.cluster.faults if (found := each(self.command, self.path))), None)
            if fault == "before":
                self.hang_up()
                return
            account = self.account()
            if url.path in self.cluster.about:
                self.reply(200, self.cluster.about[url.path])
                return
            plural, namespace, name, part = self.place(url.path)
            self.authorize(account, plural, namespace, name, part, query, json.loads(body) if body else {})
            if query.get("watch") == "true":
                self.watch(plural, namespace, query)
                return
            with self.cluster.lock:
                found = self.act(plural, namespace, name, query, json.loads(body) if body else {})
                self.cluster.settle()
            status = 201 if self.command == "POST" else 200
        except Refused as error:
            status, found = error.status, {"kind": "Status", "reason": error.reason, "message": str(error), "code": error.status}
        if fault == "after":
            self.hang_up()
        else:
            self.reply(status, found)

    def account(self) -> str:
        scheme, _, account = self.headers.get("authorization", "").partition(token_of(""))
        if scheme != "Bearer " or not account:
            raise Refused(401, "Unauthorized", "Unauthorized")
        return account

    def date_time_string(self, timestamp: float | None = None) -> str:
        """Write the ``Date`` header by the server's clock."""
        return super().date_time_string((time.time() if timestamp is None else timestamp) + self.cluster.ahead_s)

    def authorize(self, account: str, plural: str, namespace: str, name: str, part: str, query: Mapping[str, str], body: Object) -> None:
        """Refuse what the account may not do. To apply an object that does not exist is to create it, and a binding needs its role."""
        path = urlsplit(self.path).path.strip("/").split("/")
        group, resource = path[1] if path[0] == "apis" else "", f"{plural}/{part}" if part else plural
        reads = "watch" if query.get("watch") == "true" else "get" if name else "list"
        verb = {"GET": reads, "POST": "create", "PATCH": "patch", "DELETE": "delete"}[self.command]
        actions = [Action(verb, group, resource, namespace, name)]
        if self.headers["content-type"] == APPLY and (plural, namespace, name) not in self.cluster.objects:
            actions.append(Action("create", group, resource, namespace, name))
        if "roleRef" in body:
            actions.append(Action("bind", RBAC, f"{body['roleRef']['kind'].lower()}s", namespace, body["roleRef"]["name"]))
        with self.cluster.lock:
            denied = [action for action in actions if account != ADMINISTRATOR and not self.cluster.permits(account, action)]
        for action in denied:
            raise Refused(403, "Forbidden", f'forbidden: {account} cannot {action.verb} {action.resource} "{action.name}" in "{namespace}"')

    def place(self, path: str) -> tuple[str, str, str, str]:
        """Return plural, namespace, name and subresource."""
        parts = path.strip("/").split("/")
        parts = parts[2:] if parts[0] == "api" else parts[3:]
        if not parts:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        space = parts[1] if parts[0] == "namespaces" and len(parts) > 2 else ""
        plural, name, part, *_ = [*(parts[2:] if space else parts), "", "", ""]
        if plural in self.cluster.unserved:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        return plural, space, name, part

    def act(self, plural: str, namespace: str, name: str, query: Mapping[str, str], body: Object) -> Any:
        cluster, key = self.cluster, (plural, namespace, name)
        if self.command == "POST":
            return cluster.create(plural, namespace, body)
        if self.command == "DELETE":
            return cluster.delete(key, body.get("gracePeriodSeconds"))
        if self.command == "PATCH" and self.headers["content-type"] == APPLY:
            return cluster.apply(plural, namespace, name, body)
        if self.command == "PATCH":
            return cluster.merge(key, body)
        if name:
            return cluster.read(key)
        found = cluster.find(plural, namespace, query.get("labelSelector", ""))
        return {
            "items": [{name: part for name, part in each.items() if name not in ("apiVersion", "kind")} for each in found],
            "metadata": {"resourceVersion": str(cluster.version)},
        }

    def watch(self, plural: str, namespace: str, query: Mapping[str, str]) -> None:
        cluster, since = self.cluster, int(query["resourceVersion"])
        ends = time.monotonic() + float(query.get("timeoutSeconds", 60))
        with cluster.lock:
            if since < cluster.compacted:
                raise Refused(410, "Expired", f"too old resource version: {since} ({cluster.compacted})")
            generation = cluster.generation
            cluster.watches += 1
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        try:
            while time.monotonic() < ends and cluster.generation == generation:
                new, since = self.news(plural, since, generation)
                for kind, found in new:
                    if matches(found, query.get("labelSelector", "")) and namespace in ("", found["metadata"].get("namespace")):
                        self.chunk({"type": kind, "object": found})
                if query.get("allowWatchBookmarks") == "true":
                    self.chunk({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(since)}}})
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            pass  # the watcher is gone
        finally:
            self.close_connection = True
            with cluster.lock:
                cluster.watches -= 1

    def news(self, plural: str, since: int, generation: int) -> tuple[list[tuple[str, Object]], int]:
        """Wait a moment for events after `since`; returns them, and the version until which they reach."""
        cluster = self.cluster
        with cluster.changed:
            cluster.changed.wait_for(lambda: cluster.version > since or cluster.generation != generation, BOOKMARK_S)
            return [(kind, found) for at, kind, of, found in cluster.events if at > since and of == plural], cluster.version

    def chunk(self, body: Object) -> None:
        line = json.dumps(body).encode() + b"\n"
        self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        self.wfile.flush()

    def reply(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def hang_up(self) -> None:
        self.close_connection = True


def kubeconfig(client: ApiClient, account: str = ADMINISTRATOR) -> str:
    """Content of a file that ``KUBECONFIG`` may name."""
    named = {
        "clusters": [{"name": "tests", "cluster": {"server": client.configuration.host}}],
        "users": [{"name": "tests", "user": {"token": token_of(account)}}],
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "tests"}}],
    }
    return json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "tests", **named})


@contextmanager
def served(cluster: Cluster, *, port: int = 0) -> Iterator[ApiClient]:
    """Serve the cluster and return a client that is allowed everything."""
    server = ThreadingHTTPServer(("127.0.0.1", port), type("Answers", (_Answers,), {"cluster": cluster}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    settings = Configuration(host=f"http://127.0.0.1:{server.server_address[1]}")
    settings.api_key["authorization"] = f"Bearer {token_of(ADMINISTRATOR)}"
    try:
        yield ApiClient(settings)
    finally:
        cluster.break_watches()
        server.shutdown()
        thread.join()
        server.server_close()
