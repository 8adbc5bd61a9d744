"""``/v1/models``: base models and the tenant's adapters. Ids may hold ``/`` and ``:``."""

from __future__ import annotations

from fastapi import APIRouter

from control_plane.api import render, schemas
from control_plane.api.deps import PlatformDep, Reader, Writer
from control_plane.service import lineage, models, promotions

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.get("")
def list_models(platform: PlatformDep, tenant: Reader) -> schemas.ListOf[schemas.Model]:
    """Base models, then the tenant's adapters, newest first."""
    return schemas.ListOf(data=[render.model(m) for m in models.list_models(platform, tenant)])


@router.post("/{model:path}/deploy")
def deploy(platform: PlatformDep, tenant: Writer, model: str) -> schemas.Adapter:
    """Serve an adapter by its model name: the same as promoting it."""
    return render.adapter(promotions.promote(platform, tenant, model))


@router.get("/{model:path}/lineage")
def trace(platform: PlatformDep, tenant: Reader, model: str, verify: bool = False) -> schemas.Lineage:
    """Where a model comes from, named as an answer's ``model`` names it; ``verify`` reads the stored bytes again."""
    return render.lineage(lineage.of_model(platform, tenant, model, verify=verify))


@router.get("/{model:path}")
def retrieve(platform: PlatformDep, tenant: Reader, model: str) -> schemas.Model:
    """One model."""
    return render.model(models.get(platform, tenant, model))
