# Written by `python -m tools.client` from the API's OpenAPI document: change that, and run it again.
"""Objects of the API: serving."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class ModelRoute(TypedDict):
    """A name of the tenant's own that requests put into `model`."""

    name: str
    object: NotRequired[Literal["model_route"]]
    targets: list[RoutedTarget]
    created_at: int
    updated_at: int


class RouteTarget(TypedDict):
    model: str
    """An adapter of yours in production, by id or model name, or a base model."""
    weight: int
    """Of all callers, weight / sum of weights get this target."""


class RoutedTarget(TypedDict):
    model: str
    adapter_id: str | None
    """null: the base model itself."""
    weight: int
    share: float
    """Of the callers, as things are: a withdrawn target has none, and the others share its callers."""
    stage: str | None
    served: bool
    """A server was seen to answer with it."""


class SetRoute(TypedDict):
    targets: list[RouteTarget]
