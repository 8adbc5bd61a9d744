"""Logical model names."""

from __future__ import annotations

from typing import Literal

from control_plane.http.schemas import ApiBody, ApiModel, EpochSeconds


class RouteTarget(ApiBody):
    """A target of a model route."""

    model: str
    """One of your adapters in production, by id or model name, or the id of a base model."""
    weight: int
    """Weight of the target, 0 to 1,000,000. Its share of callers is its weight divided by the sum of all weights."""


class SetRoute(ApiBody):
    """The targets of a model route."""

    targets: list[RouteTarget]
    """Targets, 1 to 16, each with its weight; at least one weight must be above zero."""


class RoutedTarget(ApiModel):
    """A target of a model route as it is served now."""

    model: str
    """Model name of the adapter, or id of the base model."""
    adapter_id: str | None
    """Id of the adapter; null if the target is a base model."""
    weight: int
    """Weight of the target, 0 to 1,000,000."""
    share: float
    """Share of callers that get this target, 0 to 1. A target withdrawn from production has share 0; its callers go to the others."""
    stage: str | None
    """Stage of the adapter, such as `production`; null if the target is a base model."""
    served: bool
    """Whether an inference server has it loaded."""


class ModelRoute(ApiModel):
    """A name you choose that requests can pass as `model`, resolved to weighted targets."""

    name: str
    """Name of the route, to pass as `model` in requests."""
    object: Literal["model_route"] = "model_route"
    """Object type, always `model_route`."""
    targets: list[RoutedTarget]
    """Targets with their weights."""
    created_at: EpochSeconds
    """When the route was created, as Unix time in seconds."""
    updated_at: EpochSeconds
    """When its targets were last set, as Unix time in seconds."""
