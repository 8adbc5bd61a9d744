"""Pods of Dagster's steps on a cluster: per-run settings when ``FT_EXECUTOR=k8s`` runs every step as a pod.

Tags of a run never reach the pods of its steps; the executor configuration of a run request does, and is merged last. It is valid for that
executor only, so on one machine a run has none.

A step holds no GPU: it starts or finds the training workload, follows it and commits its results. So its pod stays away from nodes of the
pools, where it would take cores that a gang counts on, and is in no Kueue queue; it carries the queue and the priority class of its
workload as labels for people.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from control_plane.capacity import kueue
from control_plane.queue.launches import DueRun
from ft_assets.adapters.cluster import label

STEPS: Mapping[str, tuple[str, ...]] = {
    "prepare": ("dataset", "tokenized_pack"),
    "train": ("checkpoint",),
    "evaluate": ("eval_report", "adapter"),
}
"""Steps of the runs of each stage."""
REQUESTS: Mapping[str, Mapping[str, str]] = {
    "prepare": {"cpu": "2", "memory": "4Gi"},
    "train": {"cpu": "250m", "memory": "1Gi"},
    "evaluate": {"cpu": "1", "memory": "4Gi"},
}
"""A follower mostly waits: 0.5 GiB of libraries and a copy of a checkpoint's parts in flight. Validation may take
FT_VALIDATION_MEMORY_GIB (3)."""


def run_config(due: DueRun, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the ``RunRequest(run_config=...)`` of `due`; empty unless steps are pods."""
    if (os.environ if env is None else env).get("FT_EXECUTOR") != "k8s":
        return {}
    return {"execution": {"config": {"per_step_k8s_config": {step: step_pod(due) for step in STEPS[due.stage]}}}}


def step_pod(due: DueRun) -> dict[str, Any]:
    """Labels, resources and node placement of one step's pod."""
    about = {"tenant": due.tenant, "job": due.job_id, "tier": due.tier, "stage": due.stage, "pool": due.pool or ""}
    labels = {f"ft-platform/{name}": label(value) for name, value in about.items() if value}
    annotations = {}
    if due.pool:
        annotations = {
            "ft-platform/gpus": str(due.num_gpus),
            "ft-platform/workload-namespace": kueue.namespace(due.tenant),
            "ft-platform/local-queue": kueue.queue_name(due.tier, due.pool),
            "ft-platform/priority-class": kueue.priority_class(due.tier),
        }
    away = {"matchExpressions": [{"key": kueue.POOL_LABEL, "operator": "DoesNotExist"}]}
    asked = dict(REQUESTS[due.stage])
    return {
        "container_config": {"resources": {"requests": asked, "limits": {"memory": asked["memory"]}}},
        "pod_template_spec_metadata": {"labels": labels, "annotations": annotations},
        "pod_spec_config": {
            "affinity": {"node_affinity": {"required_during_scheduling_ignored_during_execution": {"node_selector_terms": [away]}}}
        },
    }
