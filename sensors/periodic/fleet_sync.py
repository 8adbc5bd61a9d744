"""Keeps the serving fleet at its desired state: adapters that should be loaded are, even after a server restarted."""

import dagster as dg

from control_plane.serving import rollout as fleet
from ft_assets.errors import Unavailable
from ft_assets.platform_resource import PlatformResource


@dg.sensor(minimum_interval_seconds=30, default_status=dg.DefaultSensorStatus.RUNNING)
def rollout(context: dg.SensorEvaluationContext, platform: PlatformResource) -> dg.SkipReason:
    """Runs one reconciliation pass; what fails is retried on a later tick. The API does the same every second."""
    try:
        done = fleet.reconcile(platform.get())
    except Unavailable as error:
        return dg.SkipReason(f"the fleet does not answer: {error.message}")
    message = [f"{d.action.kind} {d.action.name} on {d.replica}: {d.error or 'done'}" for d in done]
    return dg.SkipReason("; ".join(message) or "nothing to do")
