"""Next steps that findings name: commands to copy, for one machine or for the chart."""

from __future__ import annotations

from resources.launcher import on_kubernetes


def restart(service: str) -> str:
    """Return the command that starts the platform, or on a cluster shows why one of its services does not run."""
    return f"kubectl logs --namespace {_namespace()} deploy/ft-platform-{service}" if on_kubernetes() else "ft status || ft up"


def upgrade() -> str:
    """Return the command that runs this version's migrations and applies changed values."""
    chart = "helm upgrade ft-platform deploy/helm/ft-platform --namespace"
    return f"{chart} {_namespace()} --reuse-values" if on_kubernetes() else "ft down && ft up"


def apply_queues() -> str:
    """Return the command that applies Kueue's objects for the pools and tenants."""
    return f"kubectl exec --namespace {_namespace()} deploy/ft-platform-api -- ft admin kueue | kubectl apply --server-side -f -"


def elsewhere() -> str:
    """Return the command that runs the checks with the chart's account for them."""
    return f"helm test ft-platform --namespace {_namespace()} --logs"


def _namespace() -> str:
    from resources.launcher.kubernetes_cluster import own_namespace  # the client takes half a second to import

    return own_namespace()
