"""``/v1/recipes``: the sources of a job's defaults; ``/v1/admin/recipes``: those that operators add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Path

from control_plane.http import parameters
from control_plane.http.authentication import Operator, OperatorPlatform, PlatformDep, Reader
from control_plane.http.schemas import ListOf
from control_plane.jobs.recipes import operator_recipes, recipe_list, schemas
from control_plane.jobs.recipes.operator_recipes import Added

router = APIRouter(prefix="/v1/recipes", tags=["recipes"])
admin_router = APIRouter(prefix="/v1/admin/recipes", tags=["operators"])


@router.get("", summary="List recipes")
def list_recipes(_: Reader, platform: PlatformDep, method: parameters.RecipeMethod = "sft") -> ListOf[schemas.Recipe]:
    """List all recipes with their defaults for a training method, each default with its source."""
    return ListOf(data=recipe_list.list_recipes(platform, method=method))


@router.get("/{name}", summary="Retrieve a recipe")
def retrieve(
    _: Reader,
    platform: PlatformDep,
    name: Annotated[str, Path(description="Recipe, as `name` or `name@version`.")],
    method: parameters.RecipeMethod = "sft",
) -> schemas.Recipe:
    """Return a recipe with its defaults for a training method."""
    return recipe_list.get(platform, name, method=method)


@admin_router.get("", summary="List operators' recipes")
def list_versions(platform: OperatorPlatform) -> ListOf[schemas.RecipeVersion]:
    """List every version of the recipes that operators added, retired ones too."""
    return _listed(operator_recipes.list_versions(platform))


@admin_router.post("", summary="Add recipes")
def add(platform: OperatorPlatform, operator: Operator, body: schemas.AddRecipes) -> ListOf[schemas.RecipeVersion]:
    """Add versions of recipes, all or none. One that exists with the same content stays as it is; with other content, it is refused."""
    return _listed(operator_recipes.add(platform, body.recipes, origin="recipes", by=operator.id))


@admin_router.post("/{name}/retire", summary="Retire a recipe")
def retire(platform: OperatorPlatform, name: Annotated[str, Path(description="Name of the recipe.")]) -> ListOf[schemas.RecipeVersion]:
    """Use no version of a recipe for new jobs. Jobs that have one keep it."""
    return _listed(operator_recipes.retire(platform, name))


def _listed(versions: Sequence[Added]) -> ListOf[schemas.RecipeVersion]:
    return ListOf(data=[schemas.RecipeVersion.of(each, each.recipe, id=each.recipe.label) for each in versions])
