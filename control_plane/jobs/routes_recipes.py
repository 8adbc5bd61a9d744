"""``/v1/recipes``: where the defaults of a job come from."""

from __future__ import annotations

from fastapi import APIRouter

from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import Reader
from control_plane.jobs import recipe_list
from control_plane.models import schemas as models_schemas

router = APIRouter(prefix="/v1/recipes", tags=["recipes"])


@router.get("")
def list_recipes(_: Reader, method: str = "sft") -> http_schemas.ListOf[models_schemas.Recipe]:
    """Every recipe with its defaults for `method`, each with its source."""
    return http_schemas.ListOf(data=[models_schemas.Recipe(**r) for r in recipe_list.list_recipes(method=method)])


@router.get("/{name}")
def retrieve(_: Reader, name: str, method: str = "sft") -> models_schemas.Recipe:
    """One recipe, by name or by `name@version`."""
    return models_schemas.Recipe(**recipe_list.get(name, method=method))
