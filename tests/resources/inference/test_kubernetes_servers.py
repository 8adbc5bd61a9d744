"""Servers that the platform starts on a cluster: applied once, changed with their settings, deleted when nothing wants them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from control_plane.platform.protocols import ModelServer
from core.base_models import Catalogue
from core.errors import InvalidRequest, Unavailable
from engine.adapters import cluster, llm_d, servers
from engine.adapters.cluster import ClusterSettings
from engine.adapters.record import FULL_MODEL, AdapterRecord
from engine.adapters.stages import Stage
from engine.training import model_shapes
from engine.training.model_shapes import ModelShape
from resources.inference.kubernetes_servers import APPLIED_S, KEPT, KubernetesServers
from resources.launcher.kubernetes_api import KubernetesApi
from tests.support.kubernetes.kubernetes_api import PLURALS, Cluster, Object, Refused, served
from tests.support.models.tiny_model import build_tiny_model

NAMESPACE = "ft-platform"
DIGEST = "@sha256:" + "0" * 64
SETTINGS = ClusterSettings(vllm_image=f"vllm{DIGEST}", platform_image=f"ft{DIGEST}", object_store="s3://ft/objects")
LOG = "key AKIA is not allowed to read s3://ft/objects"
KINDS = ("deployments", "statefulsets", "services", "networkpolicies", "inferencepools")


def model(id_: str) -> AdapterRecord:
    return AdapterRecord(
        id=id_, tenant_id="acme", name=f"ft:tiny:acme:support:{id_}", type=FULL_MODEL, base_model="tiny", base_digest="b" * 64,
        job_id="ftjob-1",
        dataset_id="ds_1", pack_fingerprint="p", spec_sha256="s", lock_sha256="l", commit="c", metrics={"loss": 1.0}, eval_report_key="k",
        eval_passed=True, rank=None, alpha=None, modules=(), object_prefix=f"tenants/acme/adapters/{id_}", manifest_sha256="a" * 64,
        stage=Stage.PRODUCTION, created_at=datetime(2026, 1, 1, tzinfo=UTC),
    )  # fmt: skip


class Bench:
    def __init__(self, stack: ExitStack, models: Catalogue) -> None:
        self.cluster, self.models, self.now = Cluster(), models, 0.0
        self.cluster.create("namespaces", "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        self.client = stack.enter_context(served(self.cluster))
        self.api = KubernetesApi(self.client)

    def servers(self, **changes: Any) -> KubernetesServers:
        settings = replace(SETTINGS, **changes)
        return KubernetesServers(connect=lambda: self.api, configured=lambda: settings, models=self.models, clock=lambda: self.now)

    def names(self) -> dict[str, list[str]]:
        return {kind: found for kind in KINDS if (found := [each["metadata"]["name"] for each in self.cluster.find(kind, NAMESPACE)])}

    def set_status(self, plural: str, name: str, **status: Any) -> None:
        key = (plural, NAMESPACE, name)
        self.cluster.update(key, {**self.cluster.read(key), "status": status})

    def pod_of(self, record: AdapterRecord, **status: Any) -> None:
        labels = cluster.label_selector(servers.SERVER_COMPONENT, servers.server_object_name(record))
        pod: Object = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod", "labels": labels}, "spec": {}, "status": status}
        self.cluster.objects.pop((PLURALS["Pod"], NAMESPACE, "pod"), None)
        self.cluster.create(PLURALS["Pod"], NAMESPACE, pod)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Catalogue:
    base = build_tiny_model(tmp_path_factory.mktemp("base"))
    return Catalogue({"tiny": ({"id": "tiny", "path": str(base)}, base)})


@pytest.fixture
def bench(models: Catalogue) -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(stack, models)


def test_a_models_objects_are_those_of_its_manifest_and_are_applied_once(bench: Bench) -> None:
    one, two = model("adp-1"), model("adp-2")
    kept = bench.servers()
    assert kept.keep([one, two]) == {
        "adp-1": ModelServer(url="http://ft-adp-1.ft-platform.svc"), "adp-2": ModelServer(url="http://ft-adp-2.ft-platform.svc"),
    }  # fmt: skip
    both = ["ft-adp-1", "ft-adp-2"]
    assert bench.names() == {"deployments": both, "services": both, "networkpolicies": both}
    made = bench.cluster.read(("deployments", NAMESPACE, "ft-adp-1"))
    shape = model_shape(bench)
    (rendered,) = (each for each in servers.render_server(one, shape, SETTINGS, context_length=512) if each["kind"] == "Deployment")
    assert made["spec"] == rendered["spec"]
    bench.cluster.requests.clear()
    kept.keep([one, two])
    assert {method for method, _ in bench.cluster.requests} == {"GET"}


def model_shape(bench: Bench) -> ModelShape:
    return model_shapes.shape_of("tiny", directory=bench.models.get("tiny").directory)


def test_what_no_model_wants_is_deleted_with_all_that_it_owns_and_what_operators_applied_stays(bench: Bench) -> None:
    by_hand = servers.render_server(model("adp-9"), model_shape(bench), SETTINGS, context_length=512)
    for made in by_hand:
        bench.api.apply(made)
    bench.servers().keep([model("adp-1")])
    bench.servers().keep([])
    assert bench.names() == {kind: ["ft-adp-9"] for kind in ("deployments", "services", "networkpolicies")}


def test_a_deployment_that_was_deleted_or_applied_in_part_is_applied_again(bench: Bench) -> None:
    bench.cluster.faults.append(lambda method, path: "before" if method == "PATCH" and "services" in path else None)
    found = bench.servers().keep([model("adp-1")])["adp-1"]
    assert found.url == "" and not found.refused and "did not answer" in str(found.problem)
    bench.cluster.faults.clear()
    assert bench.servers().keep([model("adp-1")])["adp-1"].url
    assert bench.names().keys() == {"deployments", "services", "networkpolicies"}
    bench.cluster.delete(("deployments", NAMESPACE, "ft-adp-1"))
    bench.cluster.settle()
    assert bench.names() == {}
    bench.servers().keep([model("adp-1")])
    assert bench.names().keys() == {"deployments", "services", "networkpolicies"}


@pytest.mark.parametrize(("method", "path"), [("PATCH", "deployments/ft-adp-1?"), ("PATCH", "services/ft-adp-1?"), ("GET", "/pods?")])
def test_a_request_that_fails_for_one_server_hides_no_other(bench: Bench, method: str, path: str) -> None:
    bench.cluster.faults.append(lambda of, at: "before" if of == method and path in at else None)
    kept = bench.servers()
    for _ in range(2):
        found = kept.keep([model("adp-1"), model("adp-2")])
    assert "did not answer" in str(found["adp-1"].problem)
    assert found["adp-2"].url == "http://ft-adp-2.ft-platform.svc"
    assert "ft-adp-2" in bench.names()["deployments"]


def test_a_server_that_cannot_be_deleted_is_listed_and_hides_no_other(bench: Bench) -> None:
    bench.servers().keep([model("adp-1")])
    bench.cluster.faults.append(lambda method, _path: "before" if method == "DELETE" else None)
    found = bench.servers().keep([model("adp-2")])
    assert found["adp-1"].problem == "its server is still ending" and found["adp-2"].url


def test_a_server_is_listed_until_its_pods_are_gone_and_is_not_applied_meanwhile(bench: Bench) -> None:
    record, kept, key = model("adp-1"), bench.servers(), ("deployments", NAMESPACE, "ft-adp-1")
    kept.keep([record])
    held = bench.cluster.read(key)
    bench.cluster.update(key, {**held, "metadata": {**held["metadata"], "finalizers": ["foregroundDeletion"]}})
    ending = ModelServer(problem="its server is still ending")
    assert kept.keep([]) == {"adp-1": ending}
    assert "deletionTimestamp" in bench.cluster.read(key)["metadata"]
    bench.cluster.requests.clear()
    assert kept.keep([]) == kept.keep([record]) == {"adp-1": ending}, "wanted again, it waits for the end"
    assert {method for method, _ in bench.cluster.requests} == {"GET"}
    held = bench.cluster.read(key)
    bench.cluster.update(key, {**held, "metadata": {**held["metadata"], "finalizers": []}})
    assert kept.keep([]) == {}
    assert kept.keep([record])["adp-1"].url


def test_what_an_operator_applied_under_the_same_name_is_not_taken_over(bench: Bench) -> None:
    record = model("adp-1")
    for made in servers.render_server(record, model_shape(bench), SETTINGS, context_length=256):
        bench.api.apply(made)
    before = bench.cluster.read(("deployments", NAMESPACE, "ft-adp-1"))
    found = bench.servers().keep([record])["adp-1"]
    assert (found.url, found.refused) == ("", False)
    assert "Deployment ft-adp-1 was not applied by this platform; delete it" in str(found.problem)
    assert bench.cluster.read(("deployments", NAMESPACE, "ft-adp-1")) == before
    assert bench.servers().keep([]) == {} and bench.names()["deployments"] == ["ft-adp-1"]
    for each in ("deployments", "services", "networkpolicies"):
        bench.cluster.delete((each, NAMESPACE, "ft-adp-1"))
    assert bench.servers().keep([record])["adp-1"].url


def test_what_others_changed_or_deleted_is_applied_again_after_a_while(bench: Bench) -> None:
    kept, record, key = bench.servers(), model("adp-1"), ("deployments", NAMESPACE, "ft-adp-1")
    kept.keep([record])
    applied = bench.cluster.read(key)["spec"]
    bench.cluster.delete(("services", NAMESPACE, "ft-adp-1"))
    bench.cluster.merge(key, {"spec": {"replicas": 0}})
    bench.now = APPLIED_S - 1
    kept.keep([record])
    assert bench.cluster.read(key)["spec"]["replicas"] == 0
    bench.now = APPLIED_S + 1
    kept.keep([record])
    assert bench.cluster.read(key)["spec"] == applied
    assert bench.names()["services"] == ["ft-adp-1"]


@pytest.mark.parametrize(("status", "refused"), [(409, False), (422, True), (500, False)])
def test_only_an_object_that_can_never_be_applied_is_refused(bench: Bench, status: int, refused: bool) -> None:
    def answer(method: str, path: str) -> None:
        if method == "PATCH" and "deployments" in path:
            raise Refused(status, "Conflict", "apply failed")

    bench.cluster.faults.append(answer)
    found = bench.servers().keep([model("adp-1")])["adp-1"]
    assert (found.refused, found.url) == (refused, "") and "apply failed" in str(found.problem)


def test_a_mistake_in_the_settings_stops_nothing_else(bench: Bench) -> None:
    def wrong() -> ClusterSettings:
        raise InvalidRequest("FT_CLUSTER: unknown field 'colour'", code="invalid_cluster")

    kept = KubernetesServers(connect=lambda: bench.api, configured=wrong, models=bench.models)
    assert kept.pool_urls() == ()
    with pytest.raises(InvalidRequest, match="colour"):
        kept.keep([model("adp-1")])


def test_new_settings_change_what_runs(bench: Bench) -> None:
    bench.servers().keep([model("adp-1")])
    bench.servers(vllm_image=f"newer{DIGEST}").keep([model("adp-1")])
    (container,) = bench.cluster.read(("deployments", NAMESPACE, "ft-adp-1"))["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"newer{DIGEST}"


def test_a_model_that_fits_on_no_node_is_refused_with_the_reason(bench: Bench, tmp_path: Path) -> None:
    base = build_tiny_model(tmp_path)
    huge = {"num_hidden_layers": 400, "hidden_size": 32768, "intermediate_size": 131072}
    (base / "config.json").write_text(json.dumps({**json.loads((base / "config.json").read_text()), **huge}))
    bench.models = Catalogue({"tiny": ({"id": "tiny", "path": str(base)}, base)})
    found = bench.servers().keep([model("adp-1")])["adp-1"]
    assert found.refused and "do not fit on 8 x h100-80gb" in str(found.problem)
    assert bench.names() == {}


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/8 nodes are available"}]},
            "Unschedulable: 0/8 nodes are available",
        ),
        (
            {"initContainerStatuses": [{"name": "fetch", "state": {"terminated": {"exitCode": 1, "reason": "Error", "message": LOG}}}]},
            "fetch ended with 1 (Error)",
        ),
        (
            {
                "initContainerStatuses": [
                    {
                        "name": "fetch",
                        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
                        "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled", "message": LOG}},
                    }
                ]
            },
            "fetch: CrashLoopBackOff; fetch ended with 137 (OOMKilled)",
        ),
        (
            {"containerStatuses": [{"name": "vllm", "state": {"waiting": {"reason": "ImagePullBackOff", "message": LOG}}}]},
            "vllm: ImagePullBackOff",
        ),
        ({"containerStatuses": [{"name": "vllm", "state": {"waiting": {"reason": "PodInitializing"}}}]}, None),
    ],
)
def test_a_server_that_does_not_run_says_why_without_the_containers_log(bench: Bench, status: dict[str, Any], problem: str | None) -> None:
    record, kept = model("adp-1"), bench.servers()
    kept.keep([record])
    bench.pod_of(record, **status)
    assert kept.keep([record])["adp-1"].problem == problem
    bench.set_status("deployments", "ft-adp-1", availableReplicas=1)
    assert kept.keep([record])["adp-1"].problem is None


def test_pools_are_kept_beside_models_and_their_urls_are_known_without_the_cluster(bench: Bench) -> None:
    kept = replace(bench.servers(pools={"tiny": {"replicas": 3, "max_loras": 4}, "nobody": {}}), max_rank=256)
    bench.cluster.requests.clear()
    urls = kept.pool_urls()
    assert bench.cluster.requests == []
    kept.keep([model("adp-1")])
    (pool,) = bench.cluster.find("statefulsets", NAMESPACE, KEPT)
    name = pool["metadata"]["name"]
    assert list(urls) == [f"http://{name}-{n}.{name}.ft-platform.svc:8000" for n in range(3)]
    assert pool["spec"]["replicas"] == 3
    (vllm,) = pool["spec"]["template"]["spec"]["containers"]
    assert vllm["command"][vllm["command"].index("--max-loras") + 1] == "4"
    assert vllm["command"][vllm["command"].index("--max-lora-rank") + 1] == "256"
    assert bench.names() == {
        "deployments": ["ft-adp-1"], "statefulsets": [name], "services": ["ft-adp-1", name], "networkpolicies": ["ft-adp-1", name],
    }, "an InferencePool only where there is a gateway for it"  # fmt: skip
    bench.servers(pools={"tiny": {"replicas": 3}}, gateway_namespace="gateway").keep([])
    assert bench.names() == {kind: [name] for kind in ("statefulsets", "services", "networkpolicies", "inferencepools")}
    bench.servers().keep([])
    assert bench.names() == {}


def test_pools_are_not_deleted_while_the_catalogue_lacks_a_model(bench: Bench) -> None:
    bench.servers(pools={"tiny": {}}).keep([])
    before = bench.names()
    known, bench.models = bench.models, Catalogue({})
    lost = bench.servers(pools={"tiny": {}})
    assert (lost.pool_urls(), lost.keep([]), bench.names()) == ([], {}, before)
    bench.models = known
    bench.servers(pools={"tiny": {}}).keep([])
    assert bench.names() == before


def test_an_update_of_a_base_replaces_its_pool(bench: Bench, tmp_path: Path) -> None:
    bench.servers(pools={"tiny": {}}).keep([])
    (before,) = bench.names()["statefulsets"]
    base = build_tiny_model(tmp_path, seed=7)
    bench.models = Catalogue({"tiny": ({"id": "tiny", "path": str(base)}, base)})
    bench.servers(pools={"tiny": {}}).keep([])
    (after,) = bench.names()["statefulsets"]
    assert before != after
    assert after.startswith(llm_d.AdapterPool(base_model="tiny", base_digest="", shape=model_shape(bench), context_length=1).name[:8])


def test_without_the_cluster_nothing_is_known(bench: Bench) -> None:
    bench.cluster.faults.append(lambda _method, _path: "before")
    with pytest.raises(Unavailable):
        bench.servers().keep([model("adp-1")])


@pytest.mark.parametrize("size", [{"replicas": 0}, {"colour": 3}])
def test_a_pool_of_no_size_is_refused(size: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="give replicas, max_loras, max_cpu_loras"):
        replace(SETTINGS, pools={"tiny": size})
