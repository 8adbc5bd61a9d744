"""Recipes of the platform's operators: versions that never change, chosen before those that ship.

A version is stored with all that it inherits, so that an upgrade of the platform changes the defaults of no operator's recipe. A job keeps
the version that was chosen when it was submitted, whatever is added or retired before its data are packed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import yaml
from pydantic import TypeAdapter
from sqlalchemy.dialects.postgresql import insert

from control_plane.jobs.recipes.tables import RecipeVersion, recipes
from control_plane.platform.context import Platform
from control_plane.platform.records import columns, many
from core.errors import Conflict, InvalidRequest, NotFound
from engine.training import HYPERPARAMETER_LIMITS, Recipe, checked_hyperparameters, load_recipes, parse_recipes

RECIPE: TypeAdapter[Recipe] = TypeAdapter(Recipe)


@dataclass(frozen=True, kw_only=True, slots=True)
class Added:
    """A version of an operator's recipe."""

    recipe: Recipe
    added_by: str
    added_at: datetime
    retired_at: datetime | None
    is_new: bool = False
    """It was added by this call; else it existed, with the same content."""


def known(platform: Platform, *, of_job: str | None = None) -> Mapping[str, Recipe]:
    """Return what jobs may use: operators' recipes by name, those that ship, and earlier versions by label.

    `of_job`: label of a recipe that a job was submitted with; it is found although it was retired since.
    """
    found = [each for each in _stored(platform) if each.retired_at is None or each.recipe.label == of_job]
    newest = {each.recipe.name: each.recipe for each in found if each.retired_at is None}
    earlier = {each.recipe.label: each.recipe for each in found if newest.get(each.recipe.name) != each.recipe}
    return {**newest, **load_recipes(), **earlier}


def list_versions(platform: Platform) -> list[Added]:
    """Return every version that operators added, retired ones too, by name and version."""
    return _stored(platform)


def add(platform: Platform, body: Any, *, origin: str, by: str) -> list[Added]:
    """Add the recipes of a file, all or none; what exists with the same content stays as it is, or is used again if it was retired.

    Raises ``InvalidRequest`` (``invalid_recipe``) with the first mistake and its place, ``Conflict`` (``recipe_exists``) if a version
    exists with other content.
    """
    before = {each.recipe.label: each for each in _stored(platform)}
    made = _parsed(body, known(platform), origin)
    now, done = platform.clock(), list[Added]()
    for recipe in made:
        stored = before.get(recipe.label)
        if stored is not None and stored.recipe != recipe:
            raise Conflict(
                f"recipe {recipe.label} exists with other content, and a version never changes: raise its version",
                code="recipe_exists",
                param="version",
            )
        in_use = stored is not None and stored.retired_at is None
        done.append(stored if in_use and stored else Added(recipe=recipe, added_by=by, added_at=now, retired_at=None, is_new=True))
    rows = [
        {"name": new.recipe.name, "version": new.recipe.version, "definition": _definition(new.recipe), "added_by": by, "added_at": now}
        for new in done
        if new.is_new
    ]
    if rows:
        added = insert(recipes).values(rows)
        again = {"added_by": added.excluded.added_by, "added_at": added.excluded.added_at, "retired_at": None}
        with platform.engine.begin() as conn:
            conn.execute(added.on_conflict_do_update(index_elements=["name", "version"], set_=again))
    return done


def add_file(platform: Platform, path: Path, *, by: str) -> list[Added]:
    """Add the recipes of a YAML file."""
    try:
        body = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read as YAML: {error}", code="invalid_recipe", param="path") from error
    return add(platform, body, origin=str(path), by=by)


def retire(platform: Platform, name: str) -> list[Added]:
    """Use all versions of a recipe for no new job; jobs that have one keep it. Retiring it again changes nothing."""
    with platform.engine.begin() as conn:
        mine = recipes.c.name == name
        if conn.execute(sa.select(sa.func.count()).where(mine)).scalar_one() == 0:
            is_shipped = " (it ships with the platform, and cannot be retired)" if name in load_recipes() else ""
            raise NotFound(f"operators have added no recipe {name[:80]!r}{is_shipped}", code="recipe_not_found", param="name")
        conn.execute(sa.update(recipes).where(mine, recipes.c.retired_at.is_(None)).values(retired_at=platform.clock()))
    return [each for each in _stored(platform) if each.recipe.name == name]


def _stored(platform: Platform) -> list[Added]:
    query = sa.select(*columns(recipes, RecipeVersion)).order_by(recipes.c.name, recipes.c.version)
    with platform.engine.connect() as conn:
        rows = many(conn, query, RecipeVersion)
    return [Added(recipe=_recipe(r.definition), added_by=r.added_by, added_at=r.added_at, retired_at=r.retired_at) for r in rows]


def _parsed(body: Any, existing: Mapping[str, Recipe], origin: str) -> Sequence[Recipe]:
    try:
        made = parse_recipes(body, existing, origin=origin)
        for recipe in made:
            if recipe.name in load_recipes():
                raise ValueError(f"{origin}: {recipe.name} is a recipe of the platform; choose another name, and extend it")
            _check_values(recipe)
    except (ValueError, InvalidRequest) as error:
        raise InvalidRequest(str(error), code="invalid_recipe", param="recipes") from error
    return made


def _check_values(recipe: Recipe) -> None:
    """Refuse a default that a request could not have."""
    checked_hyperparameters({name: default.value for name, default in recipe.defaults.items() if name in HYPERPARAMETER_LIMITS})
    for method, overrides in recipe.methods.items():
        checked_hyperparameters({name: default.value for name, default in overrides.items()}, method=method)


def _definition(recipe: Recipe) -> dict[str, Any]:
    made: dict[str, Any] = RECIPE.dump_python(recipe, mode="json")
    return made | {"parameters": [None if math.isinf(bound) else bound for bound in recipe.parameters]}


def _recipe(definition: Mapping[str, Any]) -> Recipe:
    """Return the stored recipe; a default that the platform has had only since then is that of the recipe for any model."""
    low, high = definition["parameters"]
    stored = RECIPE.validate_python({**definition, "parameters": (low, math.inf if high is None else high)})
    return replace(stored, defaults={**load_recipes()[f"any-{stored.adapter}"].defaults, **stored.defaults})
