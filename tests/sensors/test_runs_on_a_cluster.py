"""Runs whose workers are pods: waiting for a pod is no silence, and a run that is replaced leaves no Job."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest
from dagster import DagsterInstance
from dagster._core.test_utils import create_run_for_test, instance_for_test

from control_plane.queue.launches import DueRun
from sensors.recovery import HUNG, WAITING, why_gone
from tests.support.kubernetes.kubernetes_api import Cluster, kubeconfig, served

NAMESPACE = "ft-platform"
DUE = DueRun(stage="prepare", tenant="acme", job_id="ftjob-1", tier="standard")
TAGS = {"dagster/ft_run_key": DUE.run_key}


@pytest.fixture
def cluster() -> Cluster:
    found = Cluster()
    found.create("namespaces", "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    return found


@pytest.fixture
def instance(cluster: Cluster, tmp_path: Path) -> Iterator[DagsterInstance]:
    with served(cluster) as client:
        (tmp_path / "kubeconfig").write_text(kubeconfig(client))
        config = {
            "job_namespace": NAMESPACE, "job_image": "ft-platform", "service_account_name": "runs", "instance_config_map": "files",
            "dagster_home": "/dagster", "load_incluster_config": False, "kubeconfig_file": str(tmp_path / "kubeconfig"),
        }  # fmt: skip
        launcher = {"module": "dagster_k8s", "class": "K8sRunLauncher", "config": config}
        with instance_for_test(overrides={"run_launcher": launcher}) as found:
            yield found


def started(instance: DagsterInstance, cluster: Cluster, **status: int) -> dg.DagsterRun:
    run = create_run_for_test(instance, job_name="prepare", tags=TAGS, status=dg.DagsterRunStatus.STARTED)
    metadata = {"name": f"dagster-run-{run.run_id}", "namespace": NAMESPACE}
    cluster.create("jobs", NAMESPACE, {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {"template": {}}})
    cluster.objects["jobs", NAMESPACE, metadata["name"]]["status"] = status
    return run


def began(instance: DagsterInstance, run: dg.DagsterRun) -> datetime:
    return instance.get_run_records(dg.RunsFilter(run_ids=[run.run_id]))[0].update_timestamp


def status_of(instance: DagsterInstance, run: dg.DagsterRun) -> dg.DagsterRunStatus:
    found = instance.get_run_by_id(run.run_id)
    assert found is not None
    return found.status


def test_a_run_whose_next_step_waits_for_its_pod_is_left_alone(instance: DagsterInstance, cluster: Cluster) -> None:
    run = started(instance, cluster, active=1)
    start = began(instance, run)
    assert why_gone(instance, DUE, None, start + HUNG + timedelta(seconds=1)) is None
    assert why_gone(instance, DUE, None, start + WAITING) is None
    assert why_gone(instance, DUE, start + timedelta(seconds=30), start + WAITING + timedelta(seconds=30)) is None, "a step was heard of"
    assert status_of(instance, run) is dg.DagsterRunStatus.STARTED


def test_a_run_that_is_silent_for_too_long_is_replaced_and_its_job_deleted(instance: DagsterInstance, cluster: Cluster) -> None:
    run = started(instance, cluster, active=1)
    start = began(instance, run)
    assert "was silent" in (why_gone(instance, DUE, None, start + WAITING + timedelta(seconds=1)) or "")
    assert cluster.find("jobs", NAMESPACE) == []
    assert status_of(instance, run) is dg.DagsterRunStatus.FAILURE


def test_a_run_whose_pod_has_ended_is_replaced_at_once(instance: DagsterInstance, cluster: Cluster) -> None:
    run = started(instance, cluster, failed=1)
    start = began(instance, run)
    assert "lost its process" in (why_gone(instance, DUE, None, start + timedelta(seconds=2)) or "")
    assert status_of(instance, run) is dg.DagsterRunStatus.FAILURE


def test_an_api_server_that_is_away_says_nothing_about_a_run(instance: DagsterInstance, cluster: Cluster) -> None:
    run = started(instance, cluster, active=1)
    start = began(instance, run)
    cluster.faults.append(lambda _method, _path: "before")
    assert why_gone(instance, DUE, None, start + HUNG + timedelta(seconds=1)) is None
    assert status_of(instance, run) is dg.DagsterRunStatus.STARTED
