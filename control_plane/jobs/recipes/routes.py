"""``/v1/recipes``: the sources of a job's defaults."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from control_plane.http import parameters
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import Reader
from control_plane.jobs.recipes import recipe_list, schemas

router = APIRouter(prefix="/v1/recipes", tags=["recipes"])


@router.get("", summary="List recipes")
def list_recipes(_: Reader, method: parameters.RecipeMethod = "sft") -> http_schemas.ListOf[schemas.Recipe]:
    """List all recipes with their defaults for a training method, each default with its source."""
    return http_schemas.ListOf(data=recipe_list.list_recipes(method=method))


@router.get("/{name}", summary="Retrieve a recipe")
def retrieve(
    _: Reader, name: Annotated[str, Path(description="Recipe, as `name` or `name@version`.")], method: parameters.RecipeMethod = "sft"
) -> schemas.Recipe:
    """Return a recipe with its defaults for a training method."""
    return recipe_list.get(name, method=method)
