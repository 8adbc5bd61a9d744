"""``/v1/models``: base models and the tenant's adapters. Ids may hold ``/`` and ``:``."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from control_plane.adapters import lineage, promotions
from control_plane.adapters import responses as adapters_responses
from control_plane.adapters import routes as adapters
from control_plane.adapters import schemas as adapters_schemas
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import PlatformDep, Reader, Writer
from control_plane.models import responses, schemas
from control_plane.models import service as models

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.get("")
def list_models(
    platform: PlatformDep,
    tenant: Reader,
    type: Annotated[str | None, Query(description="base_model, lora_adapter, full_model or model_route.")] = None,
    base_model: Annotated[str | None, Query(description="A base model's id: itself and what was made of it.")] = None,
) -> http_schemas.ListOf[schemas.Model]:
    """Base models, logical names, then the tenant's adapters, newest first; `type` and `base_model` narrow the list."""
    found = models.list_models(platform, tenant, type=type, base_model=base_model)
    return http_schemas.ListOf(data=[responses.model(m) for m in found])


@router.post("/{model:path}/deploy")
def deploy(platform: PlatformDep, tenant: Writer, model: str, body: schemas.Deploy | None = None) -> schemas.Adapter:
    """Promote an adapter (`stage` production, if absent), or hold it in staging, where it is not served."""
    return adapters_responses.adapter(promotions.deploy(platform, tenant, model, stage="production" if body is None else body.stage))


for action in (adapters.promote, adapters.rollback, adapters.deprecate, adapters.approve, adapters.reject):
    router.add_api_route(f"/{{adapter_id:path}}/{action.__name__}", action, methods=["POST"])


@router.get("/{model:path}/lineage")
def trace(platform: PlatformDep, tenant: Reader, model: str, verify: bool = False) -> adapters_schemas.Lineage:
    """Where a model comes from, named as an answer's ``model`` names it; ``verify`` reads the stored bytes again."""
    return adapters_responses.lineage(lineage.of_model(platform, tenant, model, verify=verify))


@router.get("/{model:path}")
def retrieve(platform: PlatformDep, tenant: Reader, model: str) -> schemas.Model:
    """One model."""
    return responses.model(models.get(platform, tenant, model))


@router.delete("/{model:path}")
def delete(platform: PlatformDep, tenant: Writer, model: str) -> http_schemas.Deleted:
    """Stop serving a fine-tuned model; its files stay for the days of grace, in which promoting it brings it back. Again changes nothing.

    A base model is refused, and a logical name too (`DELETE /v1/model_routes/{name}`).
    """
    promotions.delete(platform, tenant, model)
    return http_schemas.Deleted(id=model, object="model")
