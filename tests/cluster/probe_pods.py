"""Pods to send requests from: those of trainings, and some in a namespace of their own, of which policies select one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from engine.adapters.cluster import SERVER_USER, pod_container
from tests.cluster.installed_platform import Installed, Kubectl, Manifest

NAMESPACE = "ft-probes"
OPEN, LISTENER, CLOSED = "open", "listener", "closed"
"""The probes. No policy selects the first two; one denies everything to the last."""
PORT = 9999
"""Where :data:`LISTENER` listens, and pods in which :meth:`Pod.listen` was called."""
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=4).close()
    print("connected")
except OSError as error:
    print(type(error).__name__)
"""
REQUEST = """
import json, sys, urllib.error, urllib.request
url, token, body = sys.argv[1:]
headers = {"content-type": "application/json"} if body else {}
headers |= {"authorization": f"Bearer {token}"} if token else {}
try:
    with urllib.request.urlopen(urllib.request.Request(url, body.encode() or None, headers), timeout=10) as answer:
        print(json.dumps([answer.status, answer.read().decode("latin-1")]))
except urllib.error.HTTPError as error:
    print(json.dumps([error.code, error.read().decode("latin-1")]))
"""
LISTEN = f"""
import os, socket, time
with socket.create_server(("", {PORT})) as server:
    if os.fork():
        os._exit(0)
    os.setsid()
    for stream in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    while True:
        server.accept()[0].close()
"""
"""Goes on in the background."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pod:
    kubectl: Kubectl
    namespace: str
    name: str

    @property
    def manifest(self) -> Manifest:
        return self.kubectl.get("pod", self.name, "-n", self.namespace)

    @property
    def ip(self) -> str:
        return str(self.manifest["status"]["podIP"])

    def python(self, script: str, *args: str) -> str:
        return self.kubectl("exec", "-n", self.namespace, self.name, "--", "python", "-c", script, *args).strip()

    def read(self, path: str) -> str:
        return self.python("import pathlib, sys; print(pathlib.Path(sys.argv[1]).read_text())", path)

    def connect(self, host: str, port: int) -> str:
        """Return ``connected``, or the name of the error."""
        return self.python(CONNECT, host, str(port))

    def connects(self, host: str, port: int) -> bool:
        return self.connect(host, port) == "connected"

    def request(self, url: str, *, token: str = "", body: Any = None) -> tuple[int, str]:
        """Return the status of the answer, and its body, a character for each byte."""
        status, answer = json.loads(self.python(REQUEST, url, token, "" if body is None else json.dumps(body)))
        return status, answer

    def listen(self) -> None:
        """Accept connections at :data:`PORT` as long as the pod lives."""
        self.python(LISTEN)


@contextmanager
def probes(cluster: Installed) -> Iterator[dict[str, Pod]]:
    """The three probes, by name."""
    kubectl, names = cluster.kubectl, (OPEN, LISTENER, CLOSED)
    image = cluster.values["images"]["trainer"]
    made = [probe(name, f"{image['repository']}@{image['digest']}") for name in names]
    deny = {"podSelector": {"matchLabels": {"probe": CLOSED}}, "policyTypes": ["Ingress", "Egress"]}
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "deny", "namespace": NAMESPACE},
        "spec": deny,
    }
    kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": RESTRICTED}}, policy, *made)
    try:
        kubectl("wait", "-n", NAMESPACE, "--for=condition=Ready", "pod", *names, "--timeout=150s")
        found = {name: Pod(kubectl=kubectl, namespace=NAMESPACE, name=name) for name in names}
        found[LISTENER].listen()
        yield found
    finally:
        kubectl("delete", "namespace", NAMESPACE, ok=False)


def probe(name: str, image: str) -> Manifest:
    """Return a pod that does nothing, under the restricted standard."""
    made = pod_container("probe", image, command=("python", "-c", "import time; time.sleep(36000)"), env={}, mounts=())
    user = {"runAsNonRoot": True, "runAsUser": SERVER_USER, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {
        "automountServiceAccountToken": False, "terminationGracePeriodSeconds": 0, "securityContext": user, "containers": [made],
    }  # fmt: skip
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"probe": name}}, "spec": spec}
