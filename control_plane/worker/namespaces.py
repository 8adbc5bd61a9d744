"""Keeps the tenants' namespaces in the cluster as the tenants and the pools are."""

from __future__ import annotations

from control_plane.capacity import configured_pools
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from resources.launcher import on_kubernetes


def keep(platform: Platform) -> int:
    """Return how many namespaces were changed; none on one machine."""
    if not on_kubernetes():
        return 0
    from resources.launcher import kubernetes_cluster  # the client takes half a second to import

    return kubernetes_cluster.tenants(platform.settings).keep(tenants.list_all(platform), configured_pools.planned(platform))
