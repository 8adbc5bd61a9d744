"""What can be reached from the pod of a training: its attempt's endpoints, name servers and the object store, and nothing else.

Every refusal has a control: the same request succeeds from a pod that no policy selects, or with the token of the attempt that it concerns.
A destination that does not answer this pod either is skipped, such as the metadata address where there is no metadata service. A server on
this machine stands for addresses outside of the cluster everywhere. On a cluster whose network plugin enforces no policies, only the tests
of tokens and accounts run.

The object store of these tests checks no signatures; that a bucket refuses unsigned requests is not shown here.
"""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from agent.api_client import PREFIX
from agent.messages import FENCED
from core import layout
from core.workload import TOKEN_FILE, VARIABLE, InputFile, Workload
from tests.cluster import probe_pods
from tests.cluster.installed_platform import NAMESPACE, RELEASE, Installed, Manifest, Tenant, until
from tests.cluster.probe_pods import CLOSED, LISTENER, OPEN, PORT, Pod
from tests.cluster.small_jobs import at_step, spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
LONG = spec(100_000, batch=1, every=500)
"""A training that none of these tests outlasts, with as many rows as it needs."""
ROWS = [
    {"messages": [{"role": "user", "content": f"What is {n} times two?"}, {"role": "assistant", "content": f"It is {2 * n}."}]}
    for n in range(5000)
]
ENFORCED_WITHIN_S = 30.0
"""Time for the network plugin to apply a policy to a new pod."""
METADATA, INTERNET = "169.254.169.254", "1.1.1.1"
"""Where clouds serve credentials of a node, and an address that answers at the ports of HTTPS and DNS."""
SELF_REVIEWS = {
    "selfsubjectreviews.authentication.k8s.io", "selfsubjectaccessreviews.authorization.k8s.io",
    "selfsubjectrulesreviews.authorization.k8s.io",
}  # fmt: skip
"""What Kubernetes permits to every account: to ask what it may do."""
Address = tuple[str, int]


@pytest.fixture(scope="module")
def probes(cluster: Installed) -> Iterator[dict[str, Pod]]:
    with probe_pods.probes(cluster) as made:
        api = kubernetes_service(cluster)
        if not made[OPEN].connects(*api):
            pytest.skip("a pod without policies does not reach the Kubernetes API server, so that refusals show nothing")
        deadline = time.monotonic() + ENFORCED_WITHIN_S
        while made[CLOSED].connects(*api):
            if time.monotonic() > deadline:
                pytest.skip("this cluster enforces no NetworkPolicies: a pod to which everything is denied reaches the API server")
        yield made


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A training that runs, its pod, and what the pod knows."""

    tenant: Tenant
    job: str
    pod: Pod
    workload: Workload
    token: str

    def call(self, path: str, body: Any, *, by: Pod | None = None, token: str | None = None) -> tuple[int, Manifest]:
        """Call an endpoint of this attempt, from its own pod and with its own token by default."""
        url = f"{self.workload.report_to}{PREFIX}/{path}"
        status, answer = (by or self.pod).request(url, token=self.token if token is None else token, body=body)
        return status, json.loads(answer)

    def cancel(self) -> None:
        if self.tenant.job(self.job)["status"] == "running":
            self.tenant.openai.fine_tuning.jobs.cancel(self.job)

    @property
    def object(self) -> InputFile:
        """An object that only this tenant may read."""
        own = layout.tenant_prefix(self.tenant.name)
        return next(file for each in self.workload.inputs for file in each.files if file.key.startswith(f"{own}/"))


@pytest.fixture(scope="module")
def trainings(cluster: Installed) -> Iterator[tuple[Training, Training]]:
    """Trainings of two tenants that run at the same time."""
    tenants = [cluster.new_tenant(), cluster.new_tenant()]
    jobs = [tenant.submit(tenant.upload(ROWS), **LONG) for tenant in tenants]
    first, second = (running(tenant, job) for tenant, job in zip(tenants, jobs, strict=True))
    yield first, second
    for each in (first, second):
        each.cancel()


def running(tenant: Tenant, job: str) -> Training:
    at_step(tenant, job, 1)
    (name,) = [pod["metadata"]["name"] for pod in tenant.pods(job) if pod["status"]["phase"] == "Running"]
    pod = Pod(kubectl=tenant.installed.kubectl, namespace=tenant.namespace, name=name)
    paths = [pod.python("import os, sys; print(os.environ[sys.argv[1]])", variable) for variable in (VARIABLE, TOKEN_FILE)]
    stated, token = map(pod.read, paths)
    return Training(tenant=tenant, job=job, pod=pod, workload=Workload.from_json(stated), token=token.strip())


@pytest.fixture(scope="module")
def server_outside() -> Iterator[int]:
    """Port of a server on this machine, which no policy names."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        yield server.getsockname()[1]  # the kernel completes connections without accept()


def kubernetes_service(cluster: Installed) -> Address:
    return cluster.kubectl.get("service", "kubernetes", "-n", "default")["spec"]["clusterIP"], 443


def api_server(cluster: Installed) -> Address:
    """Where the API server listens, behind its Service."""
    found = cluster.kubectl.get("endpointslice", "kubernetes", "-n", "default")
    return found["endpoints"][0]["addresses"][0], found["ports"][0]["port"]


def database(cluster: Installed) -> Address:
    return cluster.services.address, cluster.services.postgres_port


OUTSIDE: dict[str, Callable[[Installed], Address]] = {
    "the Service of the Kubernetes API": kubernetes_service,
    "the Kubernetes API server": api_server,
    "PostgreSQL": database,
    "the metadata address": lambda _: (METADATA, 80),
    "the internet": lambda _: (INTERNET, 443),
    "the internet at the port of DNS": lambda _: (INTERNET, 53),
}


@pytest.mark.parametrize("destination", OUTSIDE)
def test_no_training_reaches(cluster: Installed, probes: dict[str, Pod], trainings: tuple[Training, Training], destination: str) -> None:
    address = OUTSIDE[destination](cluster)
    if (control := probes[OPEN].connect(*address)) != "connected":
        pytest.skip(f"{destination} answers no pod of this cluster ({control})")
    assert not trainings[0].pod.connects(*address)


def test_no_training_reaches_another_port_of_the_object_stores_machine(
    cluster: Installed, probes: dict[str, Pod], trainings: tuple[Training, Training], server_outside: int
) -> None:
    machine = cluster.services.address
    assert probes[OPEN].connects(machine, server_outside)
    assert trainings[0].pod.connects(machine, cluster.services.s3_port)
    assert not trainings[0].pod.connects(machine, server_outside)


def test_trainings_and_other_pods_do_not_reach_each_other(probes: dict[str, Pod], trainings: tuple[Training, Training]) -> None:
    mine, other = trainings[0].pod, trainings[1].pod
    mine.listen()
    other.listen()
    assert mine.connects(mine.ip, PORT) and other.connects(other.ip, PORT), "both listen"
    assert probes[OPEN].connects(probes[LISTENER].ip, PORT)
    assert not mine.connects(other.ip, PORT), "another tenant's training"
    assert not mine.connects(probes[LISTENER].ip, PORT), "a pod that lets everybody in"
    assert not probes[OPEN].connects(mine.ip, PORT), "a pod that may go everywhere"


def test_of_the_platform_only_the_api_is_reached_and_only_from_tenants_namespaces(
    cluster: Installed, probes: dict[str, Pod], trainings: tuple[Training, Training]
) -> None:
    api, dagster, code = (
        (cluster.kubectl.get("service", f"{RELEASE}-{name}", "-n", NAMESPACE)["spec"]["clusterIP"], port)
        for name, port in (("api", 8000), ("dagster", 3000), ("code-location", 3030))
    )
    daemon = Pod(kubectl=cluster.kubectl, namespace=NAMESPACE, name=f"deploy/{RELEASE}-daemon")
    assert all(daemon.connects(*each) for each in (api, dagster, code))
    assert trainings[0].pod.connects(*api)
    for each in (dagster, code):
        assert not trainings[0].pod.connects(*each)
    assert not probes[OPEN].connects(*api), "a stolen token is of no use elsewhere in the cluster"


def test_an_attempts_token_reads_and_writes_its_own_objects_only(trainings: tuple[Training, Training]) -> None:
    mine, other = trainings
    status, granted = mine.call("objects/read", {"keys": [mine.object.key]})
    assert status == 200
    status, data = mine.pod.request(granted["urls"][mine.object.key])
    assert (status, hashlib.sha256(data.encode("latin-1")).hexdigest()) == (200, mine.object.sha256)

    asked = {"keys": [other.object.key]}
    status, refused = mine.call("objects/read", asked)
    assert (status, refused["error"]["code"]) == (403, "not_its_object")
    status, granted = other.call("objects/read", asked)
    assert status == 200 and granted["urls"].keys() == {other.object.key}

    write = {"part_sha256": [hashlib.sha256(b"").hexdigest()], "upload_id": None}
    key = f"{other.workload.checkpoint_prefix}/step-00000001/weights"
    status, refused = mine.call("objects/write", {"key": key, **write})
    assert (status, refused["error"]["code"]) == (403, "not_its_object")
    assert other.call("objects/write", {"key": key, **write})[0] == 200


def test_no_other_token_opens_the_internal_endpoints_and_an_attempts_token_opens_nothing_else(trainings: tuple[Training, Training]) -> None:
    mine, other = trainings
    asked = {"keys": [mine.object.key]}
    for token in ("", "invented", mine.tenant.key, other.tenant.key):
        status, refused = mine.call("objects/read", asked, token=token)
        assert (status, refused["error"]["code"]) == (409, FENCED)
    api = mine.workload.report_to
    assert mine.pod.request(f"{api}/v1/files", token=mine.tenant.key)[0] == 200
    for path in ("/v1/files", "/v1/admin/tenants", "/metrics"):
        assert mine.pod.request(f"{api}{path}", token=mine.token)[0] in (401, 403)


def test_a_trainings_pod_has_no_account_and_its_namespace_admits_none_that_leaves_its_bounds(
    cluster: Installed, trainings: tuple[Training, Training]
) -> None:
    mine, _ = trainings
    assert mine.pod.manifest["spec"]["automountServiceAccountToken"] is False
    assert mine.pod.python("import os; print(os.path.exists('/var/run/secrets/kubernetes.io'))") == "False"
    assert resources(cluster, f"system:serviceaccount:{mine.tenant.namespace}:default", mine.tenant.namespace) <= SELF_REVIEWS
    assert "pods" in resources(cluster, f"system:serviceaccount:{NAMESPACE}:{RELEASE}-runs", mine.tenant.namespace)

    image = mine.workload.image
    for change in ({"hostNetwork": True}, {"volumes": [{"name": "host", "hostPath": {"path": "/"}}]}):
        escape = probe_pods.probe("escape", image)
        escape["spec"] |= change
        assert "violates PodSecurity" in dry_run(cluster, escape, mine.tenant.namespace)
        assert "pod/escape created" in dry_run(cluster, escape, "default")


def test_the_token_of_an_attempt_that_has_ended_opens_nothing(trainings: tuple[Training, Training]) -> None:
    """The last test, because it ends one of the trainings."""
    mine, ended = trainings
    asked = {"keys": [ended.object.key]}
    assert ended.call("objects/read", asked, by=mine.pod)[0] == 200
    ended.cancel()
    until(lambda: ended.call("objects/read", asked, by=mine.pod)[0] == 409, what="the end of the attempt")


def resources(cluster: Installed, account: str, namespace: str) -> set[str]:
    """Return the resources that an account has any right to."""
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{account.split(':')[2]}", "system:authenticated"]
    as_account = ["--as", account, *(part for group in groups for part in ("--as-group", group))]
    lines = cluster.kubectl("auth", "can-i", "--list", "--no-headers", "-n", namespace, *as_account).splitlines()
    return {line.split()[0] for line in lines if not line.startswith(" ")}


def dry_run(cluster: Installed, pod: Manifest, namespace: str) -> str:
    """Return what the API server says to a pod."""
    pod["metadata"]["namespace"] = namespace
    return cluster.kubectl("create", "--dry-run=server", "-f", "-", given=json.dumps(pod), ok=False)
