"""The cluster of this installation, from its settings."""

from __future__ import annotations

import os
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from control_plane.capacity import configured_pools
from control_plane.platform.settings import Settings
from resources.launcher import kubernetes_nodes
from resources.launcher.kubernetes_api import KubernetesApi
from resources.launcher.kubernetes_launcher import KubernetesLauncher
from resources.launcher.kubernetes_tenants import Reachable, TenantNamespaces

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""Where a pod finds the name of its namespace."""
NAMESPACE = "ft-platform"
"""The platform's namespace, where a process outside the cluster assumes it."""
HTTPS = 443


def launcher(settings: Settings) -> KubernetesLauncher:
    pools = {pool.name: pool for pool in configured_pools.configured(settings, datetime.now(UTC))}
    return KubernetesLauncher(KubernetesApi.from_environment(), namespace=own_namespace(), pools=pools)


@cache
def tenants(settings: Settings) -> TenantNamespaces:
    """Return the tenants' objects; the cluster is connected to on first use, because the API's pods have no account on it."""
    endpoint = urlsplit(os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "https://s3")
    port = endpoint.port or {"http": 80}.get(endpoint.scheme, HTTPS)
    reachable = Reachable(
        namespace=own_namespace(), api_port=settings.api_port, store_networks=settings.object_store_networks, store_port=port
    )
    return TenantNamespaces(connect=KubernetesApi.from_environment, reachable=reachable, accounts=settings.workload_accounts)


def cordon(drained: AbstractSet[str]) -> int:
    """Cordon the nodes `drained`, and no others of the platform's; returns how many changed."""
    return kubernetes_nodes.cordon(KubernetesApi.from_environment(), drained)


def own_namespace() -> str:
    return SERVICE_ACCOUNT.read_text().strip() if SERVICE_ACCOUNT.exists() else NAMESPACE
