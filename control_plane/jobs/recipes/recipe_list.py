"""Recipes as tenants see them: the defaults for one method, each with its source."""

from __future__ import annotations

import math
from typing import Any

from control_plane.jobs.submission import ALIASES
from ft_assets.training import methods, recipes
from ft_assets.training.recipes import Default, Recipe


def list_recipes(*, method: str = "sft") -> list[dict[str, Any]]:
    """Return every recipe with its defaults for `method`."""
    return [_shown(r, method) for r in recipes.load_all().values()]


def get(name: str, *, method: str = "sft") -> dict[str, Any]:
    """Return the recipe `name`, with or without its version; ``InvalidRequest`` lists the existing ones."""
    return _shown(recipes.named(name), method)


def _shown(recipe: Recipe, method: str) -> dict[str, Any]:
    of = methods.get(ALIASES.get(method, method))
    method = of.name
    defaults = {**recipe.defaults, **recipe.methods.get(method, {}), "learning_rate": recipe.learning_rate(method)}
    defaults |= {name: recipe.setting(method, name) for name in of.settings}
    low, high = recipe.parameters
    return {
        "id": recipe.label,
        "name": recipe.name,
        "version": recipe.version,
        "adapter": recipe.adapter,
        "method": method,
        "summary": recipe.summary,
        "base_models": list(recipe.base_models),
        "min_parameters": int(low),
        "max_parameters": None if math.isinf(high) else int(high),
        "defaults": {name: _default(d) for name, d in sorted(defaults.items())},
    }


def _default(default: Default) -> dict[str, Any]:
    return {"value": default.value, "source": default.source}
