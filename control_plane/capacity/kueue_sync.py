"""Kueue's objects for the pools and tenants of this platform, as files, and whether a cluster's queues still agree with them."""

from __future__ import annotations

import yaml

from control_plane.capacity import active_pools, kueue, nodes
from control_plane.capacity.pools import Pool
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from ft_assets.adapters.cluster import to_yaml
from ft_assets.errors import Conflict, InvalidRequest


def files(platform: Platform) -> dict[str, str]:
    """By file name: what all share, what each tenant has, and the labels of the nodes. Of drained nodes quotas count what is still held."""
    pools, held = _now(platform)
    try:
        shared = kueue.render(pools, held)
    except ValueError as e:
        raise Conflict(f"nothing to render: {e}", code="no_cluster") from e
    owned = [made for tenant in tenants.list_all(platform) for made in kueue.render_tenant(tenant.id, tenant.tier, pools)]
    return {"queues.yaml": to_yaml(shared), "tenants.yaml": to_yaml(owned), "nodes.sh": _labelling(kueue.node_labels(pools))}


def check(platform: Platform, text: str) -> list[str]:
    """What ClusterQueues, as ``kubectl get clusterqueues -o yaml`` writes them or as they are rendered, have otherwise."""
    try:
        documents = [d for d in yaml.safe_load_all(text) if d]
        queues = [item for d in documents for item in d.get("items", [d])]
        return kueue.differences(queues, *_now(platform))
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError) as e:
        raise InvalidRequest(
            f"these are no ClusterQueues: {str(e)[:200]}; give what `kubectl get clusterqueues -o yaml` writes", code="invalid_cluster"
        ) from e


def _now(platform: Platform) -> tuple[list[Pool], kueue.Held]:
    """The pools, and what jobs hold of each node."""
    with platform.whole.engine.connect() as conn:
        return active_pools.pools(platform, conn), nodes.held_gpus(conn)


def _labelling(labels_of: list[tuple[str, dict[str, str]]]) -> str:
    lines = ["#!/bin/sh -e", "# Labels that flavors and topologies look for. Nodes that come and go get theirs from their node group."]
    lines += [f"kubectl label --overwrite node {name} {' '.join(f'{k}={v}' for k, v in labels.items())}" for name, labels in labels_of]
    return "\n".join(lines) + "\n"
