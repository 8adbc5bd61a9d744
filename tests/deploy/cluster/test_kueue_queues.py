"""Kueue's objects are applied to the cluster as `ft admin kueue` renders them, and the cluster's quotas are compared with the pools."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from control_plane.capacity import kueue, nodes
from control_plane.platform.context import Platform
from deploy.cluster import kueue_queues
from resources.launcher.kubernetes_api import KubernetesApi
from tests.support.kubernetes.kubernetes_api import Cluster, Object, kubeconfig, served

POOLS = "pools: [{name: small, gpu_type: h100-80gb, takes: [lora], nodes: [{count: 2, gpus: 8}]}]"
PLURALS = ["clusterqueues", "cohorts", "resourceflavors", "topologies", "workloadpriorityclasses"]


class Bench:
    """A cluster, and the platform whose pools are in it."""

    def __init__(self, platform: Platform, cluster: Cluster, api: KubernetesApi) -> None:
        self.platform, self.cluster, self.api = platform, cluster, api

    def run(self) -> list[str]:
        return kueue_queues.run(self.platform, self.api)

    def rendered(self) -> list[Object]:
        return list(yaml.safe_load_all(kueue.files(self.platform)["queues.yaml"]))


@pytest.fixture
def bench(new_platform: Callable[..., Platform], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    (tmp_path / "pools.yaml").write_text(POOLS)
    cluster = Cluster()
    with served(cluster) as client:
        (tmp_path / "kubeconfig").write_text(kubeconfig(client))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        yield Bench(new_platform(pools=str(tmp_path / "pools.yaml")), cluster, KubernetesApi.from_environment())


def as_applied(found: Object, made: Object) -> Object:
    """What an object in the cluster has of the fields that were applied."""
    return {name: as_applied(found[name], part) if name == "metadata" else found[name] for name, part in made.items()}


def test_the_objects_are_applied_as_the_command_renders_them(bench: Bench) -> None:
    assert bench.run() == []
    rendered, found = bench.rendered(), list(bench.cluster.objects.values())
    assert sorted({plural for plural, *_ in bench.cluster.objects}) == PLURALS
    assert [as_applied(*pair) for pair in zip(found, rendered, strict=True)] == rendered
    queries = {path.partition("?")[2] for method, path in bench.cluster.requests if method == "PATCH"}
    assert queries == {"fieldManager=ft-platform&force=true"}


def test_applying_again_follows_a_drained_node(bench: Bench) -> None:
    bench.run()
    before = dict(bench.cluster.objects)
    nodes.drain(bench.platform, "small-0", reason="new fans", by="ops")
    assert bench.run() == []
    assert {key for key, found in bench.cluster.objects.items() if found != before[key]} == {("clusterqueues", "", "standard-small")}


def test_a_queue_of_a_pool_that_is_gone_is_reported_and_stays(bench: Bench) -> None:
    old = next(made for made in bench.rendered() if made["kind"] == "ClusterQueue")
    old["metadata"]["name"] = "standard-old"
    old["spec"]["resourceGroups"][0]["flavors"][0]["name"] = "h100-80gb-old"
    bench.cluster.create("clusterqueues", "", json.loads(json.dumps(old)))
    (reported,) = bench.run()
    assert "flavor h100-80gb-old has a quota and no pool" in reported
    assert ("clusterqueues", "", "standard-old") in bench.cluster.objects


def test_without_kueue_nothing_is_applied_and_the_error_says_what_to_install(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.cluster.unserved = PLURALS
    monkeypatch.setenv("FT_POOLS", str(bench.platform.settings.pools_file))
    monkeypatch.setenv("FT_HOME", str(bench.platform.settings.home))
    monkeypatch.setenv("FT_DATABASE_URL", bench.platform.settings.database_url)
    assert kueue_queues.main() == 1
    assert "could not find the requested resource" in (said := capsys.readouterr().out)
    assert said.endswith("install Kueue 0.19 or later\n")
    assert bench.cluster.objects == {}
