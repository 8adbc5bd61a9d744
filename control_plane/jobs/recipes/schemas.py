"""Recipes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from control_plane.http.schemas import ApiBody, ApiModel, EpochSeconds, JsonObject


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


class RecipeVersion(ApiModel):
    """A version of a recipe that an operator added."""

    id: str
    """Id of the version, `name@version`, to pass as `recipe` of a job."""
    object: Literal["recipe_version"] = "recipe_version"
    """Object type, always `recipe_version`."""
    name: str
    """Name of the recipe."""
    version: int
    """Version, which never changes."""
    adapter: str
    """Kind of adapter it applies to: `lora`, `qlora` or `full`."""
    summary: str
    """What the recipe is for, in a sentence."""
    base_models: list[str]
    """Patterns of the base model ids it applies to; empty if it applies to all."""
    added_by: str
    """Who added it: the id of an operator key, or `cli:` and the user name on the platform's machine."""
    added_at: EpochSeconds
    """When it was added, as Unix time in seconds."""
    retired_at: EpochSeconds | None
    """Since when no new job uses it, as Unix time in seconds; null if jobs do."""


class AddRecipes(ApiBody):
    """Versions of recipes."""

    recipes: list[JsonObject] = Field(min_length=1, max_length=100)
    """Recipes, 1 to 100: each with `name`, `version`, `adapter`, `summary`, and optionally `extends` (a recipe whose defaults it
    inherits), `base_models`, `parameters`, `defaults` and `methods`; each default is an object with `value` and `source`."""
