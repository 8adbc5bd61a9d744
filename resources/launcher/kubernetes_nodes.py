"""Cordons the nodes that the platform has drained, because Kueue and not the platform chooses the nodes of a gang."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from resources.launcher.kubernetes_api import NODES, KubernetesApi

CORDONED = "ft-platform/drained"
"""Label of nodes that were cordoned here: no others are uncordoned."""


def cordon(api: KubernetesApi, drained: AbstractSet[str]) -> int:
    """Make the nodes `drained` unschedulable, and schedulable those that were drained before; returns how many changed.

    Names that the cluster does not know, of pools whose nodes are counted, are skipped.
    """
    changed, cordoned = 0, {str(node["metadata"]["name"]) for node in api.list(NODES, labels=CORDONED)}
    for name in sorted(drained ^ cordoned):
        label = {"metadata": {"labels": {CORDONED: "true" if name in drained else None}}}
        changed += api.patch(NODES, name, "", {**label, "spec": {"unschedulable": name in drained}})
    return changed
