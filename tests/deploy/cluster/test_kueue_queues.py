"""Kueue's objects are applied to the cluster as `ft admin kueue` renders them, and the cluster's quotas are compared with the pools."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.client import ApiClient, Configuration
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import ResourceNotFoundError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from control_plane.capacity import kueue, nodes
from control_plane.platform.context import Platform
from deploy.cluster import kueue_queues

POOLS = "pools: [{name: small, gpu_type: h100-80gb, takes: [lora], nodes: [{count: 2, gpus: 8}]}]"
KINDS = {
    "clusterqueues": "ClusterQueue", "cohorts": "Cohort", "resourceflavors": "ResourceFlavor", "topologies": "Topology",
    "workloadpriorityclasses": "WorkloadPriorityClass",
}  # fmt: skip


class ApiServer:
    """The part of a Kubernetes API server that the command uses: discovery, server-side apply, lists."""

    def __init__(self, kinds: dict[str, str]) -> None:
        self.kinds = kinds
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.applied: list[tuple[str, str, dict[str, str]]] = []
        """Resource, name and query of each apply, in order."""

    def app(self) -> ASGIApp:
        group = "/apis/kueue.x-k8s.io/v1beta2"
        return Starlette(routes=[
            Route("/version", self._version),
            Route("/api", lambda _: JSONResponse({"kind": "APIVersions", "versions": []})),
            Route("/apis", self._groups),
            Route(group, self._resources),
            Route(group + "/{resource}", self._list),
            Route(group + "/{resource}/{name}", self._apply, methods=["PATCH"]),
        ])  # fmt: skip

    async def _version(self, _request: Request) -> JSONResponse:
        return JSONResponse({"gitVersion": "v1.34.0", "major": "1", "minor": "34"})

    async def _groups(self, _request: Request) -> JSONResponse:
        version = {"groupVersion": kueue.API, "version": "v1beta2"}
        group = {"name": "kueue.x-k8s.io", "versions": [version], "preferredVersion": version}
        return JSONResponse({"kind": "APIGroupList", "groups": [group] if self.kinds else []})

    async def _resources(self, _request: Request) -> JSONResponse:
        listed = [{"name": name, "kind": kind, "namespaced": False, "verbs": ["list", "patch"]} for name, kind in self.kinds.items()]
        return JSONResponse({"kind": "APIResourceList", "groupVersion": kueue.API, "resources": listed})

    async def _list(self, request: Request) -> JSONResponse:
        found = [made for (resource, _), made in self.objects.items() if resource == request.path_params["resource"]]
        without_kind = [{k: v for k, v in made.items() if k not in ("apiVersion", "kind")} for made in found]  # as API servers list them
        return JSONResponse({"apiVersion": kueue.API, "kind": f"{self.kinds[request.path_params['resource']]}List", "items": without_kind})

    async def _apply(self, request: Request) -> JSONResponse:
        assert request.headers["content-type"] == "application/apply-patch+yaml"
        key = (request.path_params["resource"], request.path_params["name"])
        self.objects[key] = json.loads(await request.body())
        self.applied.append((*key, dict(request.query_params)))
        return JSONResponse(self.objects[key])


@pytest.fixture
def cluster(serve: Callable[[ASGIApp], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[ApiServer], DynamicClient]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where the client keeps what it discovered

    def connect(server: ApiServer) -> DynamicClient:
        return DynamicClient(ApiClient(Configuration(host=serve(server.app()))))

    return connect


@pytest.fixture
def platform(new_platform: Callable[..., Platform], tmp_path: Path) -> Platform:
    (tmp_path / "pools.yaml").write_text(POOLS)
    return new_platform(pools=str(tmp_path / "pools.yaml"))


def test_the_objects_are_applied_as_the_command_renders_them(platform: Platform, cluster: Callable[[ApiServer], DynamicClient]) -> None:
    server = ApiServer(KINDS)
    assert kueue_queues.run(platform, cluster(server)) == []
    rendered = list(yaml.safe_load_all(kueue.files(platform)["queues.yaml"]))
    assert {made["kind"] for made in rendered} == set(KINDS.values())
    assert list(server.objects.values()) == rendered
    assert all(query == {"fieldManager": "ft-platform", "force": "True"} for *_, query in server.applied)


def test_applying_again_follows_a_drained_node(platform: Platform, cluster: Callable[[ApiServer], DynamicClient]) -> None:
    server = ApiServer(KINDS)
    client = cluster(server)
    kueue_queues.run(platform, client)
    before = dict(server.objects)
    nodes.drain(platform, "small-0", reason="new fans", by="ops")
    assert kueue_queues.run(platform, client) == []
    assert {key for key in server.objects if server.objects[key] != before[key]} == {("clusterqueues", "standard-small")}


def test_a_queue_of_a_pool_that_is_gone_is_reported_and_stays(platform: Platform, cluster: Callable[[ApiServer], DynamicClient]) -> None:
    server = ApiServer(KINDS)
    old = yaml.safe_load(
        json.dumps(next(m for m in yaml.safe_load_all(kueue.files(platform)["queues.yaml"]) if m["kind"] == "ClusterQueue"))
    )
    old["metadata"]["name"] = "standard-old"
    old["spec"]["resourceGroups"][0]["flavors"][0]["name"] = "h100-80gb-old"
    server.objects["clusterqueues", "standard-old"] = old
    (reported,) = kueue_queues.run(platform, cluster(server))
    assert "flavor h100-80gb-old has a quota and no pool" in reported
    assert ("clusterqueues", "standard-old") in server.objects


def test_without_kueue_nothing_is_applied(platform: Platform, cluster: Callable[[ApiServer], DynamicClient]) -> None:
    server = ApiServer({})
    with pytest.raises(ResourceNotFoundError):
        kueue_queues.run(platform, cluster(server))
    assert server.applied == []
