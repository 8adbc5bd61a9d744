"""The rights that the chart gives for model servers: enough for all that the worker does with them, and none besides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
import yaml

from core.base_models import Catalogue
from core.errors import Unavailable
from engine.adapters import llm_d, servers
from engine.adapters.cluster import ClusterSettings
from resources.inference.kubernetes_servers import KubernetesServers
from resources.launcher.kubernetes_api import KubernetesApi
from tests.deploy.helm.rendered_chart import EVERYTHING, MINIMAL, NAMESPACE, configuration, merged, objects, of_kind, render, values
from tests.deploy.helm.test_access import matches
from tests.resources.inference import test_kubernetes_servers as serving
from tests.resources.inference.test_kubernetes_servers import SETTINGS, Bench, model, model_shape, models
from tests.support.kubernetes.kubernetes_rbac import Rbac

__all__ = ["models"]
WORKER, API = "ft-ft-platform-worker", "ft-ft-platform-api"
ROLE = "Role ft-ft-platform-model-servers"


class BoundBench(Bench):
    """Everything is called as the worker's account."""

    def __init__(self, stack: ExitStack, models: Catalogue, rbac: Rbac) -> None:
        super().__init__(stack, models)
        rbac.guard(self.cluster)
        self.api = KubernetesApi(rbac.client(self.client, WORKER))

    def servers(self, **changes: object) -> KubernetesServers:
        settings = replace(ClusterSettings(**configuration(EVERYTHING, "cluster.yaml")), **changes)  # type: ignore[arg-type]
        return replace(super().servers(), configured=lambda: settings)


@pytest.fixture
def rbac() -> Rbac:
    return Rbac(installed=objects(EVERYTHING), namespace=NAMESPACE)


@pytest.fixture
def bench(models: Catalogue, rbac: Rbac) -> Iterator[BoundBench]:
    with ExitStack() as stack:
        yield BoundBench(stack, models, rbac)


def test_the_worker_may_do_all_that_it_does_with_servers_and_uses_each_of_its_rights(bench: BoundBench, rbac: Rbac) -> None:
    bench.servers().keep([model("adp-1")])
    assert bench.names().keys() == set(serving.KINDS), "a whole model and the pool of the values"
    bench.servers(vllm_image=f"newer{serving.DIGEST}").keep([model("adp-1")])
    bench.servers(pools={}).keep([])
    assert bench.names() == {}
    assert {right for right in rbac.unused([WORKER]) if right.role == ROLE} == set()
    assert {right for right in rbac.used if right.role == ROLE}


def test_a_model_that_waits_is_looked_at_with_the_rights_that_the_worker_has_for_workloads(bench: BoundBench) -> None:
    record = model("adp-1")
    bench.servers().keep([record])
    bench.pod_of(record, conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU"}])
    assert bench.servers().keep([record])["adp-1"].problem == "Unschedulable: no GPU"


def test_rights_hold_in_the_releases_namespace_for_the_worker_alone(bench: BoundBench, rbac: Rbac) -> None:
    bench.cluster.create("namespaces", "", {"kind": "Namespace", "metadata": {"name": "others"}})
    found = bench.servers(namespace="others", pools={})
    with pytest.raises(Unavailable, match="forbidden"):
        found.keep([])
    bench.api = KubernetesApi(rbac.client(bench.client, API))
    with pytest.raises(Unavailable, match="forbidden"):
        bench.servers().keep([])


def test_without_model_servers_there_are_no_rights_and_without_a_gateway_none_on_its_pools() -> None:
    assert "ft-ft-platform-model-servers" not in of_kind(MINIMAL, "Role")
    made = render(merged(values(EVERYTHING), {"modelServers": {"gateway_namespace": ""}}))
    (role,) = (each for each in made if each["kind"] == "Role" and each["metadata"]["name"] == "ft-ft-platform-model-servers")
    assert "inferencepools" not in {resource for rule in role["rules"] for resource in rule["resources"]}


def test_the_platform_reaches_its_own_servers_wherever_the_others_are(bench: BoundBench) -> None:
    others = [{"ipBlock": {"cidr": "10.9.0.0/16"}}]
    made = render(merged(values(EVERYTHING), {"networkPolicies": {"inference": {"port": 443, "to": others}}}))
    (policy,) = (each["spec"] for each in made if each["kind"] == "NetworkPolicy" and each["metadata"]["name"].endswith("-inference"))
    whole = servers.render_server(model("adp-1"), model_shape(bench), SETTINGS, context_length=512)
    pool = llm_d.render_pool(
        llm_d.AdapterPool(base_model="tiny", base_digest="0" * 64, shape=model_shape(bench), context_length=512), SETTINGS
    )
    for labels in (each["spec"]["template"]["metadata"]["labels"] for each in [*whole, *pool] if "template" in each["spec"]):
        reached = [
            rule for rule in policy["egress"] for peer in rule["to"] if "podSelector" in peer and matches(peer["podSelector"], labels)
        ]
        assert [rule["ports"] for rule in reached] == [[{"port": 8000}]]


def test_servers_mount_the_claim_and_read_the_secret_that_the_platform_does() -> None:
    found, given = ClusterSettings(**configuration(EVERYTHING, "cluster.yaml")), values(EVERYTHING)
    assert found.credentials_secret == given["objectStore"]["secret"]
    assert found.adapters_claim == given["volumes"]["adapters"]
    assert found.inference_secret == given["inference"]["secret"]


def test_what_the_values_say_of_servers_counts_more_than_what_other_values_do() -> None:
    given = merged(values(EVERYTHING), {"modelServers": {"credentials_secret": "read-only", "adapters_claim": "their-adapters"}})
    found = cluster_of(given)
    assert (found["credentials_secret"], found["adapters_claim"], found["namespace"]) == ("read-only", "their-adapters", NAMESPACE)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"volumes": {"adapters": ""}}, "modelServers.pools needs volumes.adapters"),
        ({"inference": {"servedAdaptersDir": "/srv/adapters"}}, "leave inference.servedAdaptersDir as it is"),
    ],
)
def test_pools_that_could_get_no_adapters_are_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(Exception, match=says):
        render(merged(values(EVERYTHING), changes))
    without = {**values(EVERYTHING), "modelServers": {**values(EVERYTHING)["modelServers"], "pools": {}}}
    assert cluster_of(merged(without, changes)), "without pools, all is well"


def test_the_installations_test_knows_the_base_models_whose_pools_it_asks() -> None:
    (pod,) = (each for each in objects(EVERYTHING) if each["kind"] == "Pod")
    assert {"name": "models", "mountPath": "/var/lib/ft/models", "readOnly": True} in pod["spec"]["containers"][0]["volumeMounts"]
    claim = {"claimName": values(EVERYTHING)["volumes"]["models"], "readOnly": True}
    assert {"name": "models", "persistentVolumeClaim": claim} in pod["spec"]["volumes"]


def cluster_of(given: dict[str, object]) -> dict[str, object]:
    """The file of FT_CLUSTER."""
    (files,) = (each for each in render(given) if each["kind"] == "ConfigMap" and each["metadata"]["name"].endswith("-files"))
    found: dict[str, object] = yaml.safe_load(files["data"]["cluster.yaml"])
    return found
