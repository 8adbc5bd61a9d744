"""Run requests for due runs, shared by the sensors and the queue listener, and the settings of their pods on a cluster.

Tags of a run never reach the pods of its steps; the executor configuration of a run request does, and is merged last. It is valid for the
k8s executor only, so on one machine a run has none.

A step holds no GPU: it starts or finds the training workload, follows it and commits its results. So its pod stays away from nodes of the
pools, where it would take cores that a gang counts on, and is in no Kueue queue; it carries the queue and the priority class of its
workload as labels for people.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from control_plane.capacity import kueue
from control_plane.platform.context import Platform
from control_plane.queue import launches
from control_plane.queue.launches import DueRun
from core.telemetry import correlation, spans
from engine.adapters import label_value
from ft_assets.partitions import partition_key
from resources.dagster.run_tags import (
    ASKED_BY_TAG,
    ATTEMPT_TAG,
    GPUS_TAG,
    JOB_TAG,
    POOL_TAG,
    REASON_TAG,
    RUN_KEY_TAG,
    SENSOR_TAG,
    TENANT_TAG,
    TIER_TAG,
    TRACE_TAG,
)

FALLBACK_S = 30
"""Interval of the sensors whose work the queue listener does at once: a tick of each every 5 s took 0.05 of a core while nothing ran."""
MAX_REQUESTS_PER_TICK = 25
"""Runs are created one by one (about 0.1 s each) within a tick that has 60 s."""
KEYS_PER_QUERY = 4 * MAX_REQUESTS_PER_TICK
"""Runs named by one query of Dagster's storage: a burst may make thousands due, of which a tick requests 25."""

REQUESTED_BY = {"prepare": "admission", "train": "scheduling", "evaluate": "scheduling"}
"""The sensor that owns the runs of a stage. The queue listener requests them earlier on its behalf, so that they are listed on that
sensor's page."""


def missing(platform: Platform, instance: dg.DagsterInstance, due: Sequence[DueRun], *, by: str) -> list[DueRun]:
    """Return those of `due` without a run that `by` may launch now; as many as fit into one tick.

    A key has one run forever: one that ended without moving its job is replaced under another key (sensor ``failures``).
    """
    left = launches.unbound(platform, due)
    for start in range(0, len(left), KEYS_PER_QUERY):
        looked_at = left[start : start + KEYS_PER_QUERY]
        made = instance.get_runs(dg.RunsFilter(tags={RUN_KEY_TAG: [d.run_key for d in looked_at]}))
        served = {run.tags[RUN_KEY_TAG] for run in made}
        won = launches.claim(platform, [d for d in looked_at if d.run_key not in served][:MAX_REQUESTS_PER_TICK], by=by)
        if won:
            return won
    return []


def run_request(due: DueRun, *, by: str = "sensor") -> dg.RunRequest:
    """Return the request of one due run, in the trace of its job; operators filter by its tags in Dagster's UI."""
    about = correlation.scope(tenant=due.tenant, job=due.job_id, attempt=due.attempt or None)
    with about, spans.span(f"request {due.stage}", parent=due.trace_parent, kind="producer", ft__run_key=due.run_key):
        return _request(due, spans.current() if due.trace_parent else None, by)


def _request(due: DueRun, trace_parent: str | None, by: str) -> dg.RunRequest:
    tags = {
        TENANT_TAG: due.tenant,
        TIER_TAG: due.tier,
        JOB_TAG: due.job_id,
        REASON_TAG: due.reason,
        RUN_KEY_TAG: due.run_key,
        ASKED_BY_TAG: by,
        SENSOR_TAG: REQUESTED_BY[due.stage],
        "dagster/priority": str(due.priority),
    }
    if trace_parent:
        tags[TRACE_TAG] = trace_parent
    if due.pool:
        tags |= {POOL_TAG: due.pool, GPUS_TAG: str(due.num_gpus), ATTEMPT_TAG: str(due.attempt)}
    return dg.RunRequest(
        run_key=due.run_key,
        job_name=due.stage,
        partition_key=partition_key(due.tenant, due.job_id),
        run_config=run_config(due),
        tags=tags,
    )


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
    labels = {f"ft-platform/{name}": label_value(value) for name, value in about.items() if value}
    annotations = {}
    if due.pool:
        annotations = {
            "ft-platform/gpus": str(due.num_gpus),
            "ft-platform/workload-namespace": kueue.namespace(due.tenant),
            "ft-platform/local-queue": kueue.queue_name(due.tier, due.pool),
            "ft-platform/priority-class": kueue.priority_class(due.tier),
        }
    away = {"matchExpressions": [{"key": kueue.POOL_LABEL, "operator": "DoesNotExist"}]}
    requested = dict(REQUESTS[due.stage])
    return {
        "container_config": {"resources": {"requests": requested, "limits": {"memory": requested["memory"]}}},
        "pod_template_spec_metadata": {"labels": labels, "annotations": annotations},
        "pod_spec_config": {
            "affinity": {"node_affinity": {"required_during_scheduling_ignored_during_execution": {"node_selector_terms": [away]}}}
        },
    }
