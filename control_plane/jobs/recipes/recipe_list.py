"""Recipes as tenants see them: the defaults for one method, each with its source."""

from __future__ import annotations

import math

from control_plane.jobs.recipes import operator_recipes, schemas
from control_plane.jobs.submission import ALIASES
from control_plane.platform.context import Platform
from engine.training import Recipe, method_named, recipe_named


def list_recipes(platform: Platform, *, method: str = "sft") -> list[schemas.Recipe]:
    """Return the recipes that jobs may use with their defaults for `method`: the operators' first."""
    return [_shown(r, method) for r in operator_recipes.known(platform).values()]


def get(platform: Platform, name: str, *, method: str = "sft") -> schemas.Recipe:
    """Return the recipe `name`, with or without its version; ``InvalidRequest`` lists the existing ones."""
    return _shown(recipe_named(name, operator_recipes.known(platform)), method)


def _shown(recipe: Recipe, method: str) -> schemas.Recipe:
    of = method_named(ALIASES.get(method, method))
    defaults = {**recipe.defaults, **recipe.methods.get(of.name, {}), "learning_rate": recipe.learning_rate(of.name)}
    defaults |= {name: recipe.setting(of.name, name) for name in of.settings}
    low, high = recipe.parameters
    return schemas.Recipe.of(
        recipe,
        id=recipe.label,
        method=of.name,
        min_parameters=int(low),
        max_parameters=None if math.isinf(high) else int(high),
        defaults=dict(sorted(defaults.items())),
    )
