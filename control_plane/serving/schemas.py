"""Logical model names."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class RouteTarget(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: Annotated[str, Field(description="An adapter of yours in production, by id or model name, or a base model.")]
    weight: Annotated[int, Field(description="Of all callers, weight / sum of weights get this target.")]


class SetRoute(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    targets: list[RouteTarget]


class RoutedTarget(BaseModel):
    model: str
    adapter_id: str | None = Field(description="null: the base model itself.")
    weight: int
    share: float = Field(description="Of the callers, as things are: a withdrawn target has none, and the others share its callers.")
    stage: str | None
    served: bool = Field(description="A server was seen to answer with it.")


class ModelRoute(BaseModel):
    """A name of the tenant's own that requests put into `model`."""

    name: str
    object: Literal["model_route"] = "model_route"
    targets: list[RoutedTarget]
    created_at: int
    updated_at: int
