"""What a tenant has in the cluster: made with it, changed with it, and deleted with its data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from ipaddress import ip_address, ip_network

import pytest

from control_plane.platform.protocols import WorkloadPhase
from control_plane.tenants.rules import Tenant
from core.errors import FtError
from core.workload import Kind, NodeShare, Workload
from engine.adapters.cluster import ClusterObject
from engine.scheduler.pools import Pool, equal_nodes
from resources.launcher.kubernetes_api import BY_KIND, KubernetesApi
from resources.launcher.kubernetes_launcher import KubernetesLauncher
from resources.launcher.kubernetes_tenants import Reachable, TenantNamespaces, render
from tests.control_plane.capacity.test_kueue import definition
from tests.support.kubernetes.kubernetes_api import Cluster, served
from tests.support.kubernetes.kubernetes_nodes import Nodes

SMALL = Pool(name="small", nodes=equal_nodes(16, prefix="s"), gpu_type="h100-80gb", max_gpus_per_job=8)
RESERVED = Pool(name="fabric", nodes=equal_nodes(32, prefix="f", fabric="ib"), gpu_type="h100-80gb", max_gpus_per_job=32, reserved_gpus=32)
POOLS = [SMALL, RESERVED]
NODE_LOCAL_DNS, PUBLIC_DNS = "169.254.20.10", ("1.1.1.1", "2606:4700:4700::1111")
REACHABLE = Reachable(namespace="ft-platform", api_port=8000, store_networks=("10.1.0.0/16",), store_port=9000)


def of_kind(kind: str, made: list[ClusterObject]) -> list[ClusterObject]:
    return [each for each in made if each["kind"] == kind]


def test_every_object_is_valid_in_strict_mode() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    jsonschema = pytest.importorskip("jsonschema")
    for made in (*render("acme", "premium", POOLS, REACHABLE), *render("bolt", "free", [SMALL], replace(REACHABLE, store_networks=()))):
        if made["apiVersion"].startswith("kueue"):
            jsonschema.validate(made, definition(made["kind"]))
        else:
            kubernetes_validate.validate(made, "1.34", strict=True)


def test_a_namespace_is_restricted_and_its_network_closed_but_for_dns_the_store_and_the_api() -> None:
    made = render("acme", "premium", POOLS, REACHABLE)
    assert made[0]["kind"] == "Namespace"
    assert made[0]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    (policy,) = of_kind("NetworkPolicy", made)
    assert (policy["spec"]["podSelector"], policy["spec"]["policyTypes"]) == ({}, ["Ingress", "Egress"])
    assert "ingress" not in policy["spec"]
    dns, api, store = policy["spec"]["egress"]
    assert {each["port"] for each in dns["ports"]} == {53}
    assert {"namespaceSelector": {}} in dns["to"]
    networks = [ip_network(peer["ipBlock"]["cidr"]) for peer in dns["to"] if "ipBlock" in peer]
    answering = {server for server in (NODE_LOCAL_DNS, *PUBLIC_DNS) if any(ip_address(server) in network for network in networks)}
    assert answering == {NODE_LOCAL_DNS}, "no selector matches a cache on the node, and no server on the internet is reached"
    assert (api["to"][0]["namespaceSelector"]["matchLabels"], api["ports"]) == (
        {"kubernetes.io/metadata.name": "ft-platform"}, [{"protocol": "TCP", "port": 8000}],
    )  # fmt: skip
    assert store == {"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}], "ports": [{"protocol": "TCP", "port": 9000}]}


def test_the_quota_is_every_gpu_that_the_tier_may_get() -> None:
    gpus = {tier: of_kind("ResourceQuota", render("acme", tier, POOLS, REACHABLE))[0]["spec"]["hard"] for tier in ("free", "premium")}
    assert gpus["free"]["requests.nvidia.com/gpu"] == "16" and gpus["premium"]["requests.nvidia.com/gpu"] == "48"
    assert {hard["services"] for hard in gpus.values()} == {"0"}


class Bench:
    def __init__(self, stack: ExitStack) -> None:
        self.cluster = Cluster()
        self.nodes = Nodes(self.cluster)
        self.api = KubernetesApi(stack.enter_context(served(self.cluster)))
        self.spaces = TenantNamespaces(connect=lambda: self.api, reachable=REACHABLE)

    def keep(self, *tenants: Tenant) -> int:
        return self.spaces.keep(tenants, POOLS)

    def names(self, plural: str) -> set[str]:
        return {f"{found['metadata'].get('namespace', '')}/{found['metadata']['name']}" for found in self.cluster.find(plural)}


@pytest.fixture
def bench() -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(stack)


def tenant(id_: str, tier: str = "standard") -> Tenant:
    return Tenant(id=id_, name=id_, tier=tier, max_jobs_in_flight=5, soft_gpu_hours=None, hard_gpu_hours=None, requests_per_minute=60)


def test_a_tenant_gets_its_namespace_once_and_it_follows_its_tier(bench: Bench) -> None:
    assert bench.keep(tenant("acme"), tenant("bolt", "premium")) == 2
    assert bench.names("namespaces") == {"/ft-platform", "/t-acme", "/t-bolt"}
    assert bench.names("localqueues") == {
        "t-acme/free-small", "t-acme/standard-small", *(f"t-bolt/{tier}-small" for tier in ("free", "standard", "premium")),
        "t-bolt/premium-fabric",
    }  # fmt: skip
    assert bench.names("networkpolicies") == bench.names("resourcequotas") == {"t-acme/ft-platform", "t-bolt/ft-platform"}
    bench.cluster.requests.clear()
    assert bench.keep(tenant("acme"), tenant("bolt", "premium")) == 0
    assert len(bench.cluster.requests) == 1, "one request finds that all is as it should be"
    assert bench.keep(tenant("acme", "premium"), tenant("bolt", "premium")) == 1
    assert "t-acme/premium-fabric" in bench.names("localqueues")
    assert bench.keep(tenant("bolt", "premium")) == 0
    assert bench.names("namespaces") == {"/ft-platform", "/t-acme", "/t-bolt"}, "a namespace that it does not know is not touched"


def test_what_was_applied_in_part_is_applied_again(bench: Bench) -> None:
    bench.cluster.faults.append(lambda _method, path: "before" if "networkpolicies" in path else None)
    with pytest.raises(Exception, match="did not answer"):
        bench.keep(tenant("acme"))
    bench.cluster.faults.clear()
    assert bench.keep(tenant("acme")) == 1
    assert bench.names("networkpolicies") == {"t-acme/ft-platform"}


def test_a_tenant_that_fails_keeps_no_other_from_getting_its_namespace(bench: Bench) -> None:
    bench.cluster.faults.append(lambda method, path: "before" if method == "PATCH" and "t-acme" in path else None)
    with pytest.raises(FtError, match="1 of 2 namespaces of tenants failed, and the others are done; first acme"):
        bench.keep(tenant("acme"), tenant("bolt"))
    assert bench.names("networkpolicies") == {"t-bolt/ft-platform"}


def test_deleting_a_tenants_data_deletes_all_that_the_cluster_has_of_it(bench: Bench) -> None:
    bench.keep(tenant("acme"), tenant("bolt"))
    launcher = KubernetesLauncher(bench.api, namespace="ft-platform", pools={"small": SMALL})
    for owner in ("acme", "bolt"):
        made = Workload(
            name=f"ftjob-{owner}-a1", kind=Kind.TRAIN, tenant=owner, job=f"ftjob-{owner}", attempt=1, image="r/ft@sha256:" + "0" * 64,
            placement=(NodeShare(node="s-0", devices=(0,)),), labels={"tenant": owner, "pool": "small", "tier": "standard"},
        )  # fmt: skip
        launcher.start_or_adopt(made, token="secret")
    assert len(bench.spaces.search("acme", ["ftjob-acme"]).found) == 3, "Job, Secret and the mark of the name"
    assert bench.spaces.erase("acme", ["ftjob-acme"], budget_s=10) == {"namespaces": 1, "workload names": 1}
    assert bench.spaces.search("acme", ["ftjob-acme"]).found == []
    assert not any("acme" in str(key) for key in bench.cluster.objects)
    assert bench.spaces.erase("acme", ["ftjob-acme"], budget_s=10) == {"namespaces": 0, "workload names": 0}
    assert launcher.get("ftjob-bolt-a1").phase is WorkloadPhase.PENDING
    assert bench.keep(tenant("acme"), tenant("bolt")) == 1, "the tenant may go on with an empty namespace"
    assert set(BY_KIND) >= {found["kind"] for found in bench.cluster.objects.values()}
