"""Manifests of what the registry holds, through the service and the API."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from starlette.types import ASGIApp

from control_plane.adapters import manifests, promotions
from control_plane.api.app import create_app
from control_plane.platform.context import Platform
from control_plane.platform.settings import load
from control_plane.serving import model_routes
from control_plane.tenants import service as tenants
from core.base_models import Catalogue
from core.errors import Conflict, FtError, InvalidRequest, NotFound, Unavailable
from tests.support.models.tiny_model import build_tiny_model
from tests.support.platform.fleet_in_memory import OwnServers, Servers
from tests.vllm.customer import Customer

DIGEST = "@sha256:" + "0" * 64
CLUSTER = {"vllm_image": f"ft-vllm{DIGEST}", "platform_image": f"ft{DIGEST}", "object_store": "s3://ft/objects", "gpu": "l4-24gb"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def on_a_cluster(new_platform: Callable[..., Platform], base: Path, tmp_path_factory: pytest.TempPathFactory) -> Platform:
    file = tmp_path_factory.mktemp("cluster") / "cluster.yaml"
    file.write_text(yaml.safe_dump(CLUSTER))
    models = Catalogue({"tiny": ({"id": "tiny", "path": str(base)}, base)})
    return replace(new_platform(cluster=str(file)), models=models)


@pytest.fixture
def customer(on_a_cluster: Platform, base: Path, tmp_path: Path) -> Customer:
    made, _ = tenants.create(on_a_cluster, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    return Customer(platform=on_a_cluster, id=made.id, base=base, scratch=tmp_path)


def objects(text: str) -> dict[str, Any]:
    return {o["kind"]: o for o in yaml.safe_load_all(text)}


def test_a_whole_model_gets_a_server_that_starts_on_its_registered_bytes(customer: Customer) -> None:
    model = customer.register(build_tiny_model(customer.scratch / "trained", seed=5))
    made = objects(manifests.server(customer.platform, customer.id, model.id))
    assert set(made) == {"Deployment", "Service", "NetworkPolicy"}
    pod = made["Deployment"]["spec"]["template"]["spec"]
    fetch, vllm = pod["initContainers"][0]["command"], pod["containers"][0]["command"]
    assert fetch[fetch.index("--manifest-sha256") + 1] == model.manifest_sha256
    assert vllm[vllm.index("--served-model-name") + 1] == model.name
    assert vllm[vllm.index("--max-model-len") + 1] == "512"  # the tiny model takes no more


def test_an_adapter_shares_a_server(customer: Customer) -> None:
    adapter = customer.register(customer.trained())
    with pytest.raises(Conflict) as refused:
        manifests.server(customer.platform, customer.id, adapter.id)
    assert refused.value.code == "shares_a_server"


def test_another_tenants_model_does_not_exist(customer: Customer) -> None:
    model = customer.register(build_tiny_model(customer.scratch / "trained", seed=5))
    other, _ = tenants.create(customer.platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    with pytest.raises(NotFound):
        manifests.server(customer.platform, other.id, model.id)


def test_a_pool_is_of_the_bytes_in_the_catalogue(customer: Customer) -> None:
    text = manifests.pool(customer.platform, "tiny", replicas=3, max_cpu_loras=64)
    made = objects(text)
    assert set(made) == {"StatefulSet", "Service", "NetworkPolicy", "InferencePool"}
    assert made["StatefulSet"]["spec"]["replicas"] == 3
    told = dict(line[2:].split("=", 1) for line in text.splitlines() if line.startswith("# FT_"))
    assert len(load(told).inference_urls) == 3 and str(load(told).served_adapters_dir) == "/adapters"
    digest = customer.platform.models.get("tiny").digest
    assert made["InferencePool"]["metadata"]["annotations"]["ft-platform/base-digest"] == digest
    with pytest.raises(InvalidRequest, match="raise max_cpu_loras"):
        manifests.pool(customer.platform, "tiny", max_cpu_loras=2)


def test_a_route_is_rewritten_to_its_versions_in_the_pool_of_their_base(customer: Customer) -> None:
    versions = [customer.register(customer.trained(seed=seed)) for seed in (1, 2)]
    for version in versions:
        promotions.promote(customer.platform, customer.id, version.id)
    model_routes.put(customer.platform, customer.id, "support", [(versions[0].id, 90), (versions[1].id, 10)])
    (made,) = objects(manifests.route(customer.platform, customer.id, "support")).values()
    (rule,) = made["spec"]["rules"]
    assert rule["matches"][0]["model"]["value"] == f"{customer.id}/support"
    assert {t["modelRewrite"]: t["weight"] for t in rule["targets"]} == {versions[0].name: 90, versions[1].name: 10}
    pool = objects(manifests.pool(customer.platform, "tiny"))["InferencePool"]
    assert made["spec"]["poolRef"]["name"] == pool["metadata"]["name"]


def test_a_route_with_a_whole_model_has_no_rewrite_because_that_is_in_no_pool(customer: Customer) -> None:
    platform = replace(customer.platform, servers=OwnServers(Servers()))
    model = customer.register(build_tiny_model(customer.scratch / "trained", seed=5))
    adapter = customer.promoted()
    promotions.promote(platform, customer.id, model.id)
    for targets in ([(model.id, 100)], [(model.id, 50), (adapter.id, 50)]):
        model_routes.put(platform, customer.id, "support", targets)
        with pytest.raises(Conflict, match=f"the whole model {model.name} as a target") as refused:
            manifests.route(platform, customer.id, "support")
        assert refused.value.code == "route_over_bases"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vllm_image": "vllm:latest"}, "pin the image by its digest"),
        ({"gpu": "rtx-9090"}, "is not known"),
        ({"colour": "red"}, "unknown field 'colour'"),
        ({"platform_image": None}, "platform_image"),
        ({"pools": ["llama-3-8b"]}, "invalid|'list' object"),
    ],
)
def test_a_cluster_that_is_described_wrongly_is_refused(customer: Customer, tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(CLUSTER | changes))
    platform = replace(customer.platform, settings=replace(customer.platform.settings, cluster_file=file))
    with pytest.raises(FtError, match=says):
        manifests.pool(platform, "tiny")


def test_without_a_cluster_the_next_step_is_named(customer: Customer) -> None:
    platform = replace(customer.platform, settings=replace(customer.platform.settings, cluster_file=None))
    with pytest.raises(Unavailable, match="set FT_CLUSTER"):
        manifests.pool(platform, "tiny")


def test_the_api_answers_with_yaml(customer: Customer, serve: Callable[[ASGIApp], str]) -> None:
    model = customer.register(build_tiny_model(customer.scratch / "trained", seed=5))
    key = tenants.create_key(customer.platform, customer.id, name="test", scopes=["admin"]).secret
    url, auth = serve(create_app(customer.platform)), {"Authorization": f"Bearer {key}"}
    for reference in (model.id, model.name):
        answer = httpx.get(f"{url}/v1/adapters/{reference}/server", headers=auth)
        assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (200, "application/yaml")
        assert objects(answer.text)["Deployment"]["metadata"]["labels"]["ft-platform/adapter"] == model.id
    assert httpx.get(f"{url}/v1/adapters/{model.id}/server").status_code == 401
    assert httpx.get(f"{url}/v1/model_routes/none/rewrite", headers=auth).json()["error"]["code"] == "route_not_found"
