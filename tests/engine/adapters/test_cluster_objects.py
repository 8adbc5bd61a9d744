"""Rendered objects: valid against the published schemas, with no more rights than they need, and tied to the registered bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from core.errors import Conflict
from engine.adapters import cluster, llm_d, servers
from engine.adapters.cluster import ClusterObject, ClusterSettings
from engine.adapters.llm_d import AdapterPool
from engine.adapters.record import FULL_MODEL, LORA_ADAPTER, AdapterRecord
from engine.adapters.stages import Stage
from engine.training import model_shapes
from resources.inference.fetch_package import _parser

SCHEMAS = Path(__file__).parents[3].parent / "shared" / "schemas"
DIGEST = "@sha256:" + "0" * 64
SETTINGS = ClusterSettings(vllm_image=f"vllm-ft{DIGEST}", platform_image=f"ft-platform{DIGEST}", object_store="s3://ft/objects")
LLAMA_8B = model_shapes.shape_of("meta-llama/Llama-3.1-8B")
RECORD = AdapterRecord(
    id="adp-0123456789abcdef01234567", tenant_id="acme", name="ft:meta-llama/Llama-3.1-8B:acme:support:0123456789ab", type=FULL_MODEL,
    base_model="meta-llama/Llama-3.1-8B", base_digest="b" * 64, job_id="ftjob-1", dataset_id="ds_1", pack_fingerprint="p",
    spec_sha256="s", lock_sha256="l", commit="c", metrics={"loss": 1.0}, eval_report_key="k", eval_passed=True, rank=None, alpha=None,
    modules=(), object_prefix="tenants/acme/adapters/adp-0123456789abcdef01234567", manifest_sha256="a" * 64, stage=Stage.DRAFT,
    created_at=datetime(2026, 1, 1, tzinfo=UTC), promoted_at=None,
)  # fmt: skip
POOL = AdapterPool(base_model="meta-llama/Llama-3.1-8B", base_digest="b" * 64, shape=LLAMA_8B, context_length=8192)


def server(**changes: Any) -> list[ClusterObject]:
    return servers.render_server(replace(RECORD, **changes), LLAMA_8B, SETTINGS, context_length=8192)


def route(**changes: Any) -> ClusterObject:
    given: dict[str, Any] = {"tenant": "acme", "name": "support", "targets": [("ft:m:acme:s:1", 90), ("ft:m:acme:s:2", 10)]}
    return llm_d.render_route(**given | {"pool": POOL.name, "settings": SETTINGS} | changes)


def everything() -> list[ClusterObject]:
    return [*server(), *llm_d.render_pool(POOL, SETTINGS), route()]


def named(objects: list[ClusterObject], kind: str) -> ClusterObject:
    (found,) = [o for o in objects if o["kind"] == kind]
    return found


def flag(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


@pytest.mark.parametrize("made", everything(), ids=lambda o: f"{o['kind']}-{o['metadata']['name'][:12]}")
def test_every_object_holds_to_its_schema(made: ClusterObject) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    if made["apiVersion"].partition("/")[0] in (llm_d.POOL_GROUP, llm_d.REWRITE_GROUP):
        return  # below
    kubernetes_validate.validate(made, "1.34", strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**made, "spec": {**made["spec"], "a_field_of_nobody": 1}}, "1.34", strict=True)


def test_the_claim_of_the_example_is_the_one_that_pools_mount() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    (example,) = re.findall(r"```yaml\n(.+?)```", (Path(__file__).parents[3] / "deploy" / "vllm" / "README.md").read_text(), re.DOTALL)
    claim = yaml.safe_load(example)
    kubernetes_validate.validate(claim, "1.34", strict=True)
    assert (claim["metadata"]["name"], claim["metadata"]["namespace"]) == (SETTINGS.adapters_claim, SETTINGS.namespace)
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def _closed(schema: Any) -> Any:
    """The schema with unknown fields refused, as the API server does for an object that is applied strictly."""
    if isinstance(schema, list):
        return [_closed(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {k: _closed(v) for k, v in schema.items()}
    return closed | {"additionalProperties": False} if "properties" in closed and "additionalProperties" not in closed else closed


def test_the_inference_pool_holds_to_the_published_definition() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    file = SCHEMAS / "inference.networking.k8s.io_inferencepools.yaml"
    if not file.is_file():
        pytest.skip(f"no definition of InferencePool at {file}")
    (version,) = [v for v in yaml.safe_load(file.read_text())["spec"]["versions"] if v["name"] == "v1"]
    schema = _closed(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    made = named(llm_d.render_pool(POOL, SETTINGS), "InferencePool")
    jsonschema.validate(made, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**made, "spec": {**made["spec"], "a_field_of_nobody": 1}}, schema)


def test_a_pool_selects_the_pods_of_its_servers_and_no_others() -> None:
    objects = llm_d.render_pool(POOL, SETTINGS)
    pods = named(objects, "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    selects = named(objects, "InferencePool")["spec"]["selector"]["matchLabels"]
    assert selects.items() <= pods.items()
    updated = named(llm_d.render_pool(replace(POOL, base_digest="c" * 64), SETTINGS), "StatefulSet")
    others = updated["spec"]["template"]["metadata"]["labels"]
    assert not selects.items() <= others.items()  # servers of other bytes are another pool


def test_the_platform_is_told_the_name_of_each_replica_and_where_it_sees_the_adapters() -> None:
    objects = llm_d.render_pool(replace(POOL, replicas=2), SETTINGS)
    servers_, service = named(objects, "StatefulSet"), named(objects, "Service")
    told = llm_d.pool_environment(replace(POOL, replicas=2), SETTINGS)
    name, space = servers_["metadata"]["name"], servers_["metadata"]["namespace"]
    assert servers_["spec"]["serviceName"] == service["metadata"]["name"] == name
    assert (service["spec"]["clusterIP"], service["spec"]["ports"][0]["port"]) == ("None", 8000)
    assert service["spec"]["selector"].items() <= servers_["spec"]["template"]["metadata"]["labels"].items()
    assert told["FT_INFERENCE_URLS"] == f"http://{name}-0.{name}.{space}.svc:8000,http://{name}-1.{name}.{space}.svc:8000"
    (vllm,) = servers_["spec"]["template"]["spec"]["containers"]
    mounts = {m["name"]: m["mountPath"] for m in vllm["volumeMounts"]}
    assert mounts["adapters"] == told["FT_SERVED_ADAPTERS_DIR"]
    (volume,) = [v for v in servers_["spec"]["template"]["spec"]["volumes"] if v["name"] == "adapters"]
    assert volume["persistentVolumeClaim"] == {"claimName": SETTINGS.adapters_claim, "readOnly": True}
    assert {o["metadata"]["namespace"] for o in objects} == {space}


def test_the_name_of_a_pool_leaves_room_for_what_a_cluster_adds_to_it() -> None:
    long = replace(POOL, base_model=f"{'organisation' * 4}/{'model' * 10}")
    assert len(long.name) <= 52 and len(POOL.name) <= 52
    assert long.name != replace(long, base_digest="c" * 64).name


def test_servers_are_called_from_their_own_namespace_the_gateways_and_no_other_unless_it_is_named() -> None:
    def callers(**changes: Any) -> list[str]:
        made = named(llm_d.render_pool(POOL, replace(SETTINGS, **changes)), "NetworkPolicy")
        (rule,) = made["spec"]["ingress"]
        assert rule["ports"] == [{"protocol": "TCP", "port": 8000}]
        return [peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] for peer in rule["from"]]

    assert callers() == ["ft-platform"]
    assert callers(gateway_namespace="istio-gateway") == ["ft-platform", "istio-gateway"]
    assert callers(namespace="models", callers=("models", "tools")) == ["models", "tools"]


def pods() -> Iterator[dict[str, Any]]:
    for made in everything():
        if made["kind"] in ("Deployment", "StatefulSet"):
            yield made["spec"]["template"]["spec"]


def test_pods_have_no_rights_that_a_model_server_does_not_need() -> None:
    found = list(pods())
    assert len(found) == 2
    for pod in found:
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not any("hostPath" in volume for volume in pod["volumes"])
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            limits = container["securityContext"]
            assert limits == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
            assert "@sha256:" in container["image"]
            assert {mount["name"] for mount in container["volumeMounts"]} <= {volume["name"] for volume in pod["volumes"]}


def test_the_server_sees_neither_the_store_nor_its_keys_and_cannot_write_the_model() -> None:
    (fetch,), (vllm,) = (named(server(), "Deployment")["spec"]["template"]["spec"][key] for key in ("initContainers", "containers"))
    assert fetch["envFrom"] == [{"secretRef": {"name": "ft-object-store"}}]
    assert "envFrom" not in vllm and "FT_OBJECT_STORE" not in {e["name"] for e in vllm["env"]}
    assert {m["mountPath"]: m.get("readOnly", False) for m in vllm["volumeMounts"]} == {"/tmp": False, "/dev/shm": False, "/model": True}


def test_every_model_server_requires_the_platforms_token_which_stands_in_a_secret() -> None:
    settings = replace(SETTINGS, inference_secret="answers")
    rendered = [*servers.render_server(RECORD, LLAMA_8B, settings, context_length=8192), *llm_d.render_pool(POOL, settings)]
    containers = [c for o in rendered if "template" in o["spec"] for c in o["spec"]["template"]["spec"]["containers"]]
    found = [c for c in containers if c["image"] == settings.vllm_image]
    assert len(found) == 2, "of a whole model and of a pool"
    for container in found:
        (key,) = [variable for variable in container["env"] if variable["name"] == "VLLM_API_KEY"]
        assert key == {"name": "VLLM_API_KEY", "valueFrom": {"secretKeyRef": {"name": "answers", "key": "token"}}}
        assert "--api-key" not in container["command"], "a command line is visible to every process of the node"


def test_what_is_fetched_is_what_was_registered() -> None:
    (fetch,) = named(server(), "Deployment")["spec"]["template"]["spec"]["initContainers"]
    asked = _parser().parse_args(fetch["command"][3:])
    assert (asked.prefix, asked.manifest_sha256, asked.base_digest) == (RECORD.object_prefix, "a" * 64, "b" * 64)
    assert str(asked.base_dir) == f"/base-models/{'b' * 64}"
    assert fetch["command"][:3] == ["python", "-m", "resources.inference.fetch_package"]


def test_a_server_answers_under_the_registered_name() -> None:
    (vllm,) = named(server(), "Deployment")["spec"]["template"]["spec"]["containers"]
    assert flag(vllm["command"], "--served-model-name") == RECORD.name
    assert flag(vllm["command"], "--max-model-len") == "8192"
    labels = named(server(), "Deployment")["metadata"]["labels"]
    assert (labels["ft-platform/tenant"], labels["ft-platform/adapter"]) == ("acme", RECORD.id)


def test_a_pool_is_started_with_what_the_platform_relies_on() -> None:
    (vllm,) = named(llm_d.render_pool(POOL, SETTINGS), "StatefulSet")["spec"]["template"]["spec"]["containers"]
    env = {e["name"]: e.get("value") for e in vllm["env"]}
    assert env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    assert "filesystem" not in env["VLLM_PLUGINS"]
    assert (env["FT_ADAPTER_INDEX"], env["FT_BASE_DIGEST"]) == (f"/adapters/index-{'b' * 16}.json", "b" * 64)
    names = vllm["command"][vllm["command"].index("--served-model-name") + 1 :][:2]
    assert names == [POOL.base_model, f"{POOL.base_model}@sha256:{'b' * 64}"]
    assert int(flag(vllm["command"], "--max-cpu-loras")) >= int(flag(vllm["command"], "--max-loras"))
    assert next(m for m in vllm["volumeMounts"] if m["mountPath"] == "/adapters")["readOnly"] is True


def test_the_plugins_named_are_the_ones_that_ship() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[3] / "deploy" / "vllm" / "pyproject.toml").read_text())
    assert set(llm_d.PLUGINS.split(",")) == set(project["project"]["entry-points"]["vllm.general_plugins"])


@pytest.mark.parametrize(
    ("model", "gpu", "context", "gpus"),
    [
        ("meta-llama/Llama-3.1-8B", "h100-80gb", 8192, 1),
        ("meta-llama/Llama-3.1-8B", "l4-24gb", 2048, 1),
        ("meta-llama/Llama-3.1-8B", "l4-24gb", 16384, 2),
        ("meta-llama/Llama-3.1-70B", "h100-80gb", 8192, 4),
        ("meta-llama/Llama-3.1-70B", "h200-141gb", 8192, 2),
    ],
)
def test_the_gpus_of_a_server_follow_from_the_models_size(model: str, gpu: str, context: int, gpus: int) -> None:
    assert cluster.num_gpus(model_shapes.shape_of(model), replace(SETTINGS, gpu=gpu), max_model_len=context) == gpus


def test_what_fits_on_no_node_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit on 8 x t4-16gb"):
        cluster.num_gpus(model_shapes.shape_of("meta-llama/Llama-3.1-70B"), replace(SETTINGS, gpu="t4-16gb"), max_model_len=8192)


def test_several_gpus_share_one_model() -> None:
    made = servers.render_server(RECORD, model_shapes.shape_of("meta-llama/Llama-3.1-70B"), SETTINGS, context_length=8192)
    (vllm,) = named(made, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert flag(vllm["command"], "--tensor-parallel-size") == vllm["resources"]["limits"]["nvidia.com/gpu"] == "4"


def test_an_adapter_has_no_server_of_its_own() -> None:
    with pytest.raises(Conflict, match="served beside others") as refused:
        server(type=LORA_ADAPTER)
    assert refused.value.code == "shares_a_server"


def test_a_route_shares_requests_of_one_tenants_name_between_models() -> None:
    spec = route()["spec"]
    assert route()["apiVersion"] == "inference.networking.x-k8s.io/v1alpha2"
    assert spec["poolRef"] == {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": POOL.name}
    (rule,) = spec["rules"]
    assert rule["matches"] == [{"model": {"type": "Exact", "value": "acme/support"}}]
    assert rule["targets"] == [{"modelRewrite": "ft:m:acme:s:1", "weight": 90}, {"modelRewrite": "ft:m:acme:s:2", "weight": 10}]


def test_routes_of_two_tenants_never_meet() -> None:
    one, two = route(tenant="a-b", name="c"), route(tenant="a", name="b-c")
    assert one["spec"]["rules"][0]["matches"] != two["spec"]["rules"][0]["matches"]
    assert one["metadata"]["name"] != two["metadata"]["name"]


def test_a_target_without_weight_gets_no_requests_and_a_route_needs_one() -> None:
    made = route(targets=[("a", 0), ("b", 5)])
    assert made["spec"]["rules"][0]["targets"] == [{"modelRewrite": "b", "weight": 5}]
    with pytest.raises(ValueError, match="no target with a weight"):
        route(targets=[("a", 0)])
    with pytest.raises(ValueError, match="exceeds 1000000"):
        route(targets=[("a", 2_000_000)])


@pytest.mark.parametrize("image", ["vllm:latest", "vllm", f"vllm{DIGEST[:-1]}", f"vllm {DIGEST}"])
def test_an_image_without_its_digest_is_refused(image: str) -> None:
    with pytest.raises(ValueError, match="pin the image"):
        replace(SETTINGS, vllm_image=image)


def test_unusual_names_make_names_that_a_cluster_takes() -> None:
    for value in ("acme", "a" * 200, "Ünïcode!", "-x-", "a/b", "a.b_c", ""):
        assert len(cluster.label_value(value)) <= 63
        name = cluster.kubernetes_name("ft", value)
        assert len(name) <= 63 and name.strip("-") == name and name == name.lower()
    assert cluster.label_value("a/b") != cluster.label_value("a-b") and cluster.kubernetes_name("a/b") != cluster.kubernetes_name("a-b")


def test_the_yaml_reads_back_as_the_objects() -> None:
    objects = everything()
    assert list(yaml.safe_load_all(cluster.objects_yaml(objects))) == json.loads(json.dumps(objects))
    assert cluster.objects_yaml(objects) == cluster.objects_yaml(everything())
