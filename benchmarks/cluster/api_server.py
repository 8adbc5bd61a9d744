"""A Kubernetes API server of this benchmark's own, with its etcd, and what it did for whom, from its audit log."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from kubernetes.client import ApiClient, ApiextensionsV1Api, Configuration, CoreV1Api, VersionApi
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from control_plane.capacity import kueue
from tests.support.servers.inference_server import free_port

ASSETS = "KUBEBUILDER_ASSETS"
USERS = ("launcher", "usual", "cluster")
"""Who calls: the platform's launcher, the usual way, and what plays the rest of the cluster. All may do everything."""
AUDIT = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": [{"level": "Metadata"}]}
START_S = 120.0


class NotReady(Exception):
    """The API server does not answer yet."""


@dataclass(frozen=True, kw_only=True)
class ApiServer:
    url: str
    certificate: Path
    audit_log: Path
    processes: Sequence[psutil.Process]
    """Of the API server and its etcd."""

    def client(self, user: str) -> ApiClient:
        settings = Configuration(host=self.url, api_key={"authorization": f"Bearer {token_of(user)}"})
        settings.ssl_ca_cert = str(self.certificate)
        return ApiClient(settings)

    def calls(self, user: str, since: float) -> Counter[str]:
        """Return the requests that `user` has sent since a time, by verb and kind."""
        found = Counter[str]()
        seen = set[str]()
        for line in self.audit_log.read_text().splitlines():
            event: dict[str, Any] = json.loads(line)
            at = datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp()
            if event["user"]["username"] != user or at < since or event["auditID"] in seen:
                continue
            seen.add(event["auditID"])  # a watch is logged when it begins and when it ends
            found[f"{event['verb']} {event.get('objectRef', {}).get('resource', event['requestURI'])}"] += 1
        return found

    def cpu_s(self) -> float:
        """Return the CPU time that the API server and etcd have used."""
        return sum(each.cpu_times().user + each.cpu_times().system for each in self.processes)


def token_of(user: str) -> str:
    return f"token-of-{user}"


@contextmanager
def running(home: Path) -> Iterator[ApiServer]:
    """Run etcd and an API server on 127.0.0.1, with their data in `home`."""
    started: list[subprocess.Popen[bytes]] = []
    log = (home / "servers.log").open("wb")
    store, peer, port = (free_port() for _ in range(3))
    url, certificates = f"http://127.0.0.1:{store}", home / "certificates"
    peers = f"http://127.0.0.1:{peer}"
    etcd = [
        f"--data-dir={home / 'etcd'}", f"--listen-client-urls={url}", f"--advertise-client-urls={url}", "--unsafe-no-fsync",
        f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}", f"--initial-cluster=default={peers}",
    ]  # fmt: skip
    try:
        for command in ([program("etcd"), *etcd], [program("kube-apiserver"), *_options(home, url, port, certificates)]):
            started.append(subprocess.Popen(command, stdout=log, stderr=log))
        made = ApiServer(
            url=f"https://127.0.0.1:{port}", certificate=certificates / "apiserver.crt", audit_log=home / "audit.log",
            processes=[psutil.Process(each.pid) for each in started],
        )  # fmt: skip
        _wait(made, home / "servers.log")
        _serve_workloads(made)
        yield made
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(30)
        log.close()


def program(name: str) -> str:
    """Return the path of a program: in the folder of ``KUBEBUILDER_ASSETS``, or else installed."""
    folder = os.environ.get(ASSETS)
    found = (shutil.which(name, path=folder) if folder else None) or shutil.which(name)
    if found is None:
        raise SystemExit(f"no {name} found; set {ASSETS} to a folder with etcd and kube-apiserver, as setup-envtest downloads them")
    return found


def version(server: ApiServer) -> str:
    found: str = VersionApi(server.client("cluster")).get_code().git_version
    return found


def _options(home: Path, store: str, port: int, certificates: Path) -> list[str]:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    private, public = home / "accounts.key", home / "accounts.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    tokens, policy = home / "tokens.csv", home / "audit.json"
    tokens.write_text("".join(f'{token_of(user)},{user},{user},"system:masters"\n' for user in USERS))
    policy.write_text(json.dumps(AUDIT))
    return [
        f"--etcd-servers={store}", "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", f"--secure-port={port}",
        f"--cert-dir={certificates}", f"--token-auth-file={tokens}", "--authorization-mode=RBAC", "--service-cluster-ip-range=10.0.0.0/24",
        "--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={public}",
        f"--service-account-signing-key-file={private}", "--disable-admission-plugins=ServiceAccount", "--endpoint-reconciler-type=none",
        f"--audit-policy-file={policy}", f"--audit-log-path={home / 'audit.log'}", "--audit-log-mode=blocking",
    ]  # fmt: skip


def _wait(server: ApiServer, log: Path) -> None:
    """Wait until the API server serves namespaces, which it makes itself."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            CoreV1Api(server.client("cluster")).read_namespace("default")
            return
        except (ApiException, HTTPError, OSError) as error:
            ended = [each for each in server.processes if not each.is_running() or each.status() == psutil.STATUS_ZOMBIE]
            if ended or time.monotonic() > deadline:
                raise NotReady(log.read_text(errors="replace")[-3000:]) from error
            time.sleep(0.2)


def _serve_workloads(server: ApiServer) -> None:
    """Serve Kueue's Workloads, which the launcher follows, with any content."""
    group, _, version = kueue.API.partition("/")
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    names = {"kind": "Workload", "plural": "workloads", "singular": "workload"}
    versions = [{"name": version, "served": True, "storage": True, "schema": schema}]
    spec = {"group": group, "scope": "Namespaced", "names": names, "versions": versions}
    api = ApiextensionsV1Api(server.client("cluster"))
    definition = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": f"workloads.{group}"}}
    api.create_custom_resource_definition({**definition, "spec": spec})
    deadline = time.monotonic() + START_S
    while not any(each.type == "Established" and each.status == "True" for each in _conditions(api, group)):
        if time.monotonic() > deadline:
            raise NotReady("Kueue's Workloads are not served")
        time.sleep(0.1)


def _conditions(api: ApiextensionsV1Api, group: str) -> Sequence[Any]:
    return api.read_custom_resource_definition(f"workloads.{group}").status.conditions or ()
