"""API responses for model routes."""

from __future__ import annotations

from control_plane.platform.epoch_time import epoch_seconds
from control_plane.serving import model_routes, schemas


def model_route(route: model_routes.Route) -> schemas.ModelRoute:
    return schemas.ModelRoute(
        name=route["name"],
        targets=[schemas.RoutedTarget(**t) for t in route["targets"]],
        created_at=epoch_seconds(route["created_at"]),
        updated_at=epoch_seconds(route["updated_at"]),
    )
