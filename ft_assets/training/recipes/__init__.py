"""Recipes: versioned YAML beside this file, each default with its source. Which one a request gets is decided here."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict

from ft_assets.errors import InvalidRequest

DIRECTORY = Path(__file__).parent


@dataclass(frozen=True, kw_only=True, slots=True)
class Default:
    value: Any
    source: str
    """Where the number comes from: a paper, a measurement, a rule of the platform."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    name: str
    version: int
    base_models: tuple[str, ...]
    """Catalogue ids that get this recipe by themselves; none: it is the fallback of its adapter kind."""
    adapter: Literal["lora", "qlora", "full"]
    summary: str
    defaults: Mapping[str, Default]

    @property
    def label(self) -> str:
        """``<name>@<version>``, as recorded in the spec."""
        return f"{self.name}@{self.version}"

    def value(self, name: str) -> Any:
        return self.defaults[name].value


class _DefaultFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    value: int | float | str
    source: str


class _RecipeFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    version: int
    base_models: list[str]
    adapter: Literal["lora", "qlora", "full"]
    summary: str
    defaults: dict[str, _DefaultFile]


def parse(text: str) -> Recipe:
    """A recipe from its YAML; a default without a source is refused."""
    body = _RecipeFile.model_validate(yaml.safe_load(text))
    return Recipe(
        name=body.name,
        version=body.version,
        base_models=tuple(body.base_models),
        adapter=body.adapter,
        summary=body.summary,
        defaults={k: Default(value=d.value, source=d.source) for k, d in body.defaults.items()},
    )


@functools.cache
def load_all() -> Mapping[str, Recipe]:
    """Every shipped recipe by name."""
    found = [parse(path.read_text()) for path in sorted(DIRECTORY.glob("*.yaml"))]
    return {r.name: r for r in found}


def select(base_model: str, *, adapter: str, name: str | None = None) -> Recipe:
    """The recipe called `name`, else the one made for `base_model`, else the fallback of `adapter`."""
    recipes = load_all()
    if name is not None:
        wanted = name.partition("@")[0]
        if wanted not in recipes or (("@" in name) and recipes[wanted].label != name):
            offered = ", ".join(r.label for r in recipes.values())
            raise InvalidRequest(f"recipe {name!r} does not exist; choose one of {offered}", code="invalid_recipe", param="recipe")
        return recipes[wanted]
    for recipe in recipes.values():
        if base_model in recipe.base_models and recipe.adapter == adapter:
            return recipe
    for recipe in recipes.values():
        if not recipe.base_models and recipe.adapter == adapter:
            return recipe
    known = sorted({r.adapter for r in recipes.values()})
    raise InvalidRequest(
        f"no recipe trains {base_model} with adapter {adapter!r}; use one of {', '.join(known)}", code="unsupported_method", param="method"
    )
