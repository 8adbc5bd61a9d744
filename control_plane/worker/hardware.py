"""Watches the hardware of the nodes through the metrics of NVIDIA's DCGM exporter, which a Prometheus server collects."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import sqlalchemy as sa

from control_plane.attempts import health
from control_plane.capacity import node_health
from control_plane.capacity.rules import METRICS
from control_plane.capacity.tables import node_drains
from control_plane.platform.context import Platform
from resources import prometheus
from resources.launcher import on_kubernetes

ERRORS = f'{{__name__=~"{"|".join(METRICS)}"}}'
CLOCKS = "quantile_over_time(0.5, DCGM_FI_DEV_SM_CLOCK[10m])"
"""The median of ten minutes: a GPU that is idle for less than half of the time, while others save a checkpoint, is not slow."""


def read_errors(platform: Platform) -> int:
    """Take nodes out of service whose GPUs report new hardware errors; returns how many."""
    if not (url := platform.settings.prometheus_url):
        return 0
    readings = defaultdict[str, dict[str, float]](dict)
    for sample in prometheus.query(url, ERRORS):
        labels = sample.labels
        values, key = readings[labels.get("Hostname", "")], f"{_gpu(labels)}/{labels['__name__']}"
        values[key] = max(sample.value, values.get(key, 0.0))  # a partitioned GPU has a series for each part
    return len(node_health.record(platform, readings))


def report_slow(platform: Platform) -> int:
    """Report GPUs that are slower than the others of their job; returns of how many jobs. On a cluster only: the exporter names pods."""
    if not (url := platform.settings.prometheus_url):
        return 0
    clocks = defaultdict[str, dict[str, float]](dict)
    for sample in prometheus.query(url, CLOCKS):
        pod = sample.labels.get("exported_pod") or sample.labels.get("pod", "")
        clocks[pod.rsplit("-", 2)[0]][f"{_gpu(sample.labels)} of node {sample.labels.get('Hostname')}"] = sample.value
    return health.judge_clocks(platform, clocks)


def cordon(platform: Platform) -> int:
    """Cordon drained nodes of a cluster, and uncordon those that are drained no more; returns how many changed."""
    if not on_kubernetes():
        return 0
    from resources.launcher import kubernetes_cluster  # the client takes half a second to import

    with platform.engine.connect() as conn:
        drained = set(conn.execute(sa.select(node_drains.c.node)).scalars())
    return kubernetes_cluster.cordon(drained)


def _gpu(labels: Mapping[str, str]) -> str:
    return f"GPU {labels.get('gpu')} ({labels.get('UUID')})"
