"""The cluster as the platform's processes reach it: the tenants' namespaces, their deletion, and the launcher."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from control_plane import composition
from control_plane.capacity import kueue
from control_plane.platform.context import Platform
from control_plane.platform.protocols import WorkloadPhase
from control_plane.serving import own_servers
from control_plane.tenants import service as tenants
from control_plane.worker import attempt_watch, namespaces
from core.errors import Conflict
from resources.dagster.configured_resources import LauncherResource
from resources.launcher import LocalGangs, open_launcher
from resources.launcher.kubernetes_launcher import KubernetesLauncher
from tests.support.jobs.followed_jobs import until
from tests.support.kubernetes.kubernetes_api import Cluster, kubeconfig, served
from tests.support.kubernetes.kubernetes_nodes import Nodes


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    made = Cluster()
    Nodes(made)
    with served(made) as client:
        (tmp_path / "kubeconfig").write_text(kubeconfig(client))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        monkeypatch.setenv("FT_EXECUTOR", "k8s")
        yield made


def spaces(cluster: Cluster) -> set[str]:
    return {found["metadata"]["name"] for found in cluster.find("namespaces", selector=kueue.TENANT_LABEL)}


def test_the_worker_makes_a_namespace_for_each_tenant(fresh_platform: Platform, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("acme", "bolt"):
        tenants.create(fresh_platform, name)
    assert namespaces.keep(fresh_platform) == 2
    assert spaces(cluster) == {"t-acme", "t-bolt"}
    assert namespaces.keep(fresh_platform) == 0
    monkeypatch.delenv("FT_EXECUTOR")
    tenants.create(fresh_platform, "cask")
    assert namespaces.keep(fresh_platform) == 0, "there is no cluster on one machine"


def test_the_cluster_is_searched_when_a_tenants_data_is_deleted(
    fresh_platform: Platform, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants.create(fresh_platform, "acme")
    namespaces.keep(fresh_platform)
    settings = replace(fresh_platform.settings, api_port=8123)  # a platform that no other test has opened
    (records,) = [each for each in composition.open_platform(settings).records if each.name == "kubernetes"]
    assert records.erase("acme", [], budget_s=5)["namespaces"] == 1
    assert spaces(cluster) == set() and records.search("acme", []).found == []
    monkeypatch.delenv("FT_EXECUTOR")
    local = composition.open_platform(replace(settings, api_port=8124))
    assert "kubernetes" not in {each.name for each in local.records}


def test_the_executor_chooses_the_launcher_and_a_process_has_one(
    fresh_platform: Platform, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(fresh_platform.settings, api_port=8125)
    launcher = open_launcher(settings)
    assert isinstance(launcher, KubernetesLauncher) and open_launcher(settings) is launcher, "its watches are shared"
    assert launcher.get("ftjob-1-a1").phase is WorkloadPhase.ABSENT
    assert any("configmaps/ftjob-1-a1" in path for _, path in cluster.requests)
    monkeypatch.setenv("FT_HOME", str(tmp_path))
    assert isinstance(LauncherResource(directory=str(tmp_path)).open(), KubernetesLauncher)
    monkeypatch.delenv("FT_EXECUTOR")
    assert isinstance(open_launcher(settings), LocalGangs)
    assert isinstance(LauncherResource(directory=str(tmp_path)).open(), LocalGangs)


def test_a_watch_that_cannot_list_the_workloads_goes_on_with_what_it_knows(
    fresh_platform: Platform, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    platform = replace(fresh_platform, settings=replace(fresh_platform.settings, api_port=8128))
    cluster.faults.append(lambda method, path: "before" if method == "GET" and "/configmaps?" in path else None)
    ending = threading.Event()
    watching = threading.Thread(target=attempt_watch.watch, args=(platform, ending))
    watching.start()
    until(lambda: "cannot be" in caplog.text, timeout_s=30)
    ending.set()
    watching.join(30)
    assert "ended workloads cannot be listed now" in caplog.text
    assert "the attempts cannot be watched now" not in caplog.text, "it was not begun again"
    open_launcher(platform.settings).close()  # type: ignore[attr-defined]


def test_a_process_without_an_account_on_the_cluster_opens_the_platform(fresh_platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    """The API's pods have no token; deletions are carried out by the worker."""
    monkeypatch.setenv("FT_EXECUTOR", "k8s")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    opened = composition.open_platform(replace(fresh_platform.settings, api_port=8127))
    (records,) = [each for each in opened.records if each.name == "kubernetes"]
    with pytest.raises(Conflict) as refused:
        records.search("acme", [])
    assert refused.value.code == "no_cluster"


def test_a_mistake_in_the_settings_of_model_servers_stops_no_process(
    fresh_platform: Platform, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FT_EXECUTOR", "k8s")
    (tmp_path / "cluster.yaml").write_text("colour: red")
    opened = composition.open_platform(
        replace(fresh_platform.settings, cluster_file=tmp_path / "cluster.yaml", inference_urls=("http://a",))
    )
    assert opened.servers is not None
    assert own_servers.urls(opened) == ["http://a"]
    assert "unknown field 'colour'" in caplog.text


def test_without_a_cluster_the_error_says_what_to_set(fresh_platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_EXECUTOR", "k8s")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with pytest.raises(Conflict, match="run in a pod, or set KUBECONFIG") as refused:
        open_launcher(replace(fresh_platform.settings, api_port=8126))
    assert refused.value.code == "no_cluster"
