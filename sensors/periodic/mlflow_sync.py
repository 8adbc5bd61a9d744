"""Keeps MLflow's registered models in step with the registry: stages, approvals and aliases, within a minute of a change."""

import dagster as dg

from control_plane.models import mlflow_mirror
from ft_assets.platform_resource import PlatformResource


@dg.sensor(minimum_interval_seconds=30, default_status=dg.DefaultSensorStatus.RUNNING)
def model_registry(context: dg.SensorEvaluationContext, platform: PlatformResource) -> dg.SkipReason:
    """Runs one pass; an unavailable registry is asked again two minutes later."""
    opened = platform.get()
    changes = mlflow_mirror.mirror(opened)
    problem = mlflow_mirror.problem(opened)
    return dg.SkipReason(problem or ("nothing has changed" if changes is None else f"changes: {changes}"))
