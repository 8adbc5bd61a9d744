"""``/v1/recipes``: where the defaults of a job come from."""

from __future__ import annotations

from fastapi import APIRouter

from control_plane.api import schemas
from control_plane.api.deps import Reader
from control_plane.service import recipes

router = APIRouter(prefix="/v1/recipes", tags=["recipes"])


@router.get("")
def list_recipes(_: Reader, method: str = "sft") -> schemas.ListOf[schemas.Recipe]:
    """Every recipe with its defaults for `method`, each with its source."""
    return schemas.ListOf(data=[schemas.Recipe(**r) for r in recipes.list_recipes(method=method)])


@router.get("/{name}")
def retrieve(_: Reader, name: str, method: str = "sft") -> schemas.Recipe:
    """One recipe, by name or by `name@version`."""
    return schemas.Recipe(**recipes.get(name, method=method))
