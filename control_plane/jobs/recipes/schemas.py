"""Recipes."""

from __future__ import annotations

from typing import Any, Literal

from control_plane.http.schemas import ApiModel


class RecipeDefault(ApiModel):
    """The default of one hyperparameter."""

    value: Any
    """The default value."""
    source: str
    """Where the value comes from, such as a paper or a measurement."""


class Recipe(ApiModel):
    """Defaults for jobs with one kind of adapter on base models of a certain family or size."""

    id: str
    """Id of the recipe, `name@version`, to pass as `recipe` of a job."""
    object: Literal["recipe"] = "recipe"
    """Object type, always `recipe`."""
    name: str
    """Name of the recipe, without its version."""
    version: int
    """Version of the recipe."""
    adapter: str
    """Kind of adapter it applies to: `lora`, `qlora` or `full`."""
    method: str
    """Training method whose defaults are shown."""
    summary: str
    """What the recipe is for, in a sentence."""
    base_models: list[str]
    """Patterns of the base model ids it applies to; empty if it applies to all."""
    min_parameters: int
    """Minimum number of parameters of base models it applies to."""
    max_parameters: int | None
    """Number of parameters that base models must stay below; null if there is no limit."""
    defaults: dict[str, RecipeDefault]
    """Defaults by hyperparameter, each with its source."""
