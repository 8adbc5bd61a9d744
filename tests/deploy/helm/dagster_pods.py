"""Jobs that Dagster's own launcher and executor make of the chart's ``dagster.yaml``; nothing is sent to a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from dagster import DagsterRun
from dagster._core.launcher import RunLauncher
from dagster._serdes import ConfigurableClassData
from dagster_k8s import K8sRunLauncher
from dagster_k8s.container_context import K8sContainerContext
from dagster_k8s.job import UserDefinedDagsterK8sConfig, construct_dagster_k8s_job
from kubernetes.client import ApiClient

from control_plane.queue.launches import DueRun
from sensors.run_requests import STEPS, run_config
from tests.deploy.helm.rendered_chart import Manifest, Pod, configuration

KUBECONFIG = {
    "apiVersion": "v1", "kind": "Config", "current-context": "none", "users": [{"name": "none", "user": {}}],
    "clusters": [{"name": "none", "cluster": {"server": "http://127.0.0.1:1"}}],
    "contexts": [{"name": "none", "context": {"cluster": "none", "user": "none"}}],
}  # fmt: skip


def launcher(values: str, directory: Path) -> K8sRunLauncher:
    """Return the launcher that Dagster makes of the configuration, but outside a cluster."""
    file = directory / "kubeconfig"
    file.write_text(yaml.safe_dump(KUBECONFIG))
    configured = configuration(values, "dagster.yaml")["run_launcher"]
    config = {**configured["config"], "load_incluster_config": False, "kubeconfig_file": str(file)}
    made = ConfigurableClassData(configured["module"], configured["class"], yaml.safe_dump(config)).rehydrate(as_type=RunLauncher)
    assert isinstance(made, K8sRunLauncher)
    return made


def run_job(made_by: K8sRunLauncher) -> Manifest:
    """Return the Job of a run."""
    return _job(made_by, K8sContainerContext.create_for_run(DagsterRun(job_name="train"), made_by, include_run_tags=True), "run_worker")


def step_job(made_by: K8sRunLauncher, stage: str) -> Manifest:
    """Return the Job of the first step of a run of `stage`, configured as the sensors configure it."""
    pooled: dict[str, Any] = {"pool": "small", "num_gpus": 8, "attempt": 1} if stage == "train" else {}
    due = DueRun(stage=stage, tenant="acme", job_id="ftjob-1", tier="premium", **pooled)
    of_step = run_config(due, {"FT_EXECUTOR": "k8s"})["execution"]["config"]["per_step_k8s_config"][STEPS[stage][0]]
    context = K8sContainerContext.create_for_run(DagsterRun(job_name=stage), made_by, include_run_tags=False)
    return _job(
        made_by,
        context.merge(K8sContainerContext(run_k8s_config=UserDefinedDagsterK8sConfig.from_dict(of_step))),  # type: ignore[no-untyped-call]
        "step_worker",
    )


def _job(made_by: K8sRunLauncher, context: K8sContainerContext, component: str) -> Manifest:
    made = construct_dagster_k8s_job(
        job_config=context.get_k8s_job_config(job_image=None, run_launcher=made_by), args=["dagster", "api", "execute_run"],
        job_name="dagster-run-x", component=component, user_defined_k8s_config=context.run_k8s_config,
    )  # fmt: skip
    found: Manifest = ApiClient().sanitize_for_serialization(made)
    return found


def pod_of(job: Manifest) -> Pod:
    labels = job["spec"]["template"]["metadata"]["labels"]
    return Pod(kind="Job", component=labels["app.kubernetes.io/component"], labels=labels, spec=job["spec"]["template"]["spec"])
