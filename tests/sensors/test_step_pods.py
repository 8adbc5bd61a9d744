"""Pods of steps: what a run's configuration says of them arrives in the Kubernetes Job that Dagster makes."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest
from dagster_k8s import DagsterK8sJobConfig, k8s_job_executor
from dagster_k8s.job import UserDefinedDagsterK8sConfig, construct_dagster_k8s_job

from control_plane.queue.launches import DueRun
from ft_assets.asset_jobs import EVALUATE, PREPARE, TRAIN
from sensors import run_requests

K8S = {"FT_EXECUTOR": "k8s"}
ABOUT = {"tenant": "acme", "job_id": "ftjob-1", "tier": "premium"}


def due(stage: str = "train", **changes: Any) -> DueRun:
    pooled = {"pool": "fabric", "num_gpus": 16, "attempt": 1} if stage == "train" else {}
    return DueRun(**{"stage": stage, **ABOUT, **pooled, **changes})


def job_of(run: DueRun) -> dict[str, Any]:
    """The Job that the executor's own functions make of the configuration."""
    ((_, config),) = run_requests.run_config(run, K8S)["execution"]["config"]["per_step_k8s_config"].items()
    made = construct_dagster_k8s_job(
        job_config=DagsterK8sJobConfig(job_image="ft-platform@sha256:" + "0" * 64, dagster_home="/dagster"),
        args=["dagster", "api", "execute_step"],
        job_name="dagster-step-x",
        user_defined_k8s_config=UserDefinedDagsterK8sConfig.from_dict(config),  # type: ignore[no-untyped-call]
    )
    return dict(made.to_dict())


def test_the_pod_of_a_training_step_says_where_its_workload_queues_and_takes_no_gpu() -> None:
    template = job_of(due())["spec"]["template"]
    assert template["metadata"]["labels"].items() >= {
        "ft-platform/tenant": "acme", "ft-platform/job": "ftjob-1", "ft-platform/tier": "premium", "ft-platform/pool": "fabric",
    }.items()  # fmt: skip
    assert template["metadata"]["annotations"] == {
        "ft-platform/gpus": "16", "ft-platform/workload-namespace": "t-acme", "ft-platform/local-queue": "premium-fabric",
        "ft-platform/priority-class": "ft-premium",
    }  # fmt: skip
    assert "kueue.x-k8s.io/queue-name" not in template["metadata"]["labels"]
    (container,) = template["spec"]["containers"]
    assert container["resources"]["requests"] == {"cpu": "250m", "memory": "1Gi"}
    affinity = template["spec"]["affinity"]["node_affinity"]["required_during_scheduling_ignored_during_execution"]
    (term,) = affinity["node_selector_terms"]
    assert [(e["key"], e["operator"]) for e in term["match_expressions"]] == [("ft-platform/pool", "DoesNotExist")]


def test_the_job_holds_to_the_schema_of_kubernetes() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    from kubernetes.client import ApiClient

    ((_, config),) = run_requests.run_config(due(), K8S)["execution"]["config"]["per_step_k8s_config"].items()
    made = construct_dagster_k8s_job(
        job_config=DagsterK8sJobConfig(job_image="ft-platform", dagster_home="/dagster"), args=[], job_name="dagster-step-x",
        user_defined_k8s_config=UserDefinedDagsterK8sConfig.from_dict(config),  # type: ignore[no-untyped-call]
    )  # fmt: skip
    kubernetes_validate.validate(ApiClient().sanitize_for_serialization(made), "1.34", strict=True)


@pytest.mark.parametrize(("stage", "asset_job"), [("prepare", PREPARE), ("train", TRAIN), ("evaluate", EVALUATE)])
def test_every_step_of_a_stage_is_told_and_the_executor_takes_it(stage: str, asset_job: Any) -> None:
    steps = run_requests.STEPS[stage]
    assert str(asset_job.selection) == str(dg.AssetSelection.assets(*steps))

    @dg.op(name=steps[0])
    def first() -> None: ...

    @dg.job(executor_def=k8s_job_executor)
    def stage_job() -> None:
        first()

    assert dg.validate_run_config(stage_job, run_requests.run_config(due(stage), K8S))["execution"]


def test_on_one_machine_a_run_says_nothing_of_pods() -> None:
    assert run_requests.run_config(due(), {}) == {}
    assert run_requests.run_config(due(), {"FT_EXECUTOR": "in_process"}) == {}
    assert "annotations" not in str(run_requests.run_config(due("prepare"), K8S)).replace("'annotations': {}", "")
