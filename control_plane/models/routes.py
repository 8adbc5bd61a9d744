"""``/v1/models``: base models, model routes and the tenant's adapters. Ids may contain ``/`` and ``:``."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from control_plane.adapters import lineage, promotions
from control_plane.adapters import responses as adapters_responses
from control_plane.adapters import routes as adapters
from control_plane.adapters import schemas as adapters_schemas
from control_plane.http import parameters
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import PlatformDep, Reader, Writer
from control_plane.models import responses, schemas
from control_plane.models import service as models

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.get("", summary="List models")
def list_models(
    platform: PlatformDep,
    tenant: Reader,
    type: Annotated[
        str | None, Query(description="Return only models of this type: `base_model`, `lora_adapter`, `full_model` or `model_route`.")
    ] = None,
    base_model: Annotated[str | None, Query(description="Return only this base model, and the adapters and routes based on it.")] = None,
) -> http_schemas.ListOf[schemas.Model]:
    """List base models, then your model routes, then your adapters, newest first."""
    found = models.list_models(platform, tenant, type=type, base_model=base_model)
    return http_schemas.ListOf(data=[responses.model(m) for m in found])


@router.post("/{model:path}/deploy", summary="Deploy an adapter")
def deploy(
    platform: PlatformDep, tenant: Writer, model: parameters.ModelName, body: schemas.Deploy | None = None
) -> adapters_schemas.Adapter:
    """Promote an adapter to production, or hold it in staging, where it is not served."""
    return adapters_responses.adapter(promotions.deploy(platform, tenant, model, stage="production" if body is None else body.stage))


for action, summary in (
    (adapters.promote, "Promote an adapter"),
    (adapters.rollback, "Roll back an adapter"),
    (adapters.deprecate, "Deprecate an adapter"),
    (adapters.approve, "Approve an adapter"),
    (adapters.reject, "Reject an adapter"),
):
    router.add_api_route(f"/{{adapter_id:path}}/{action.__name__}", action, methods=["POST"], summary=summary)


@router.get("/{model:path}/lineage", summary="Trace the lineage of a model")
def trace(
    platform: PlatformDep, tenant: Reader, model: parameters.ModelName, verify: parameters.Verify = False
) -> adapters_schemas.Lineage:
    """Trace a model back to the uploaded files it was trained on. With `verify`, all stored bytes are checked as well."""
    return adapters_responses.lineage(lineage.of_model(platform, tenant, model, verify=verify))


@router.get("/{model:path}", summary="Retrieve a model")
def retrieve(platform: PlatformDep, tenant: Reader, model: parameters.ModelName) -> schemas.Model:
    """Return a base model, a model route or one of your adapters."""
    return responses.model(models.get(platform, tenant, model))


@router.delete("/{model:path}", summary="Delete a fine-tuned model")
def delete(platform: PlatformDep, tenant: Writer, model: parameters.ModelName) -> http_schemas.Deleted:
    """Stop serving a fine-tuned model. Its files are kept for 30 days, during which it can be promoted again.

    Deleting it again changes nothing. Base models cannot be deleted; to delete a model route, use `DELETE /v1/model_routes/{name}`.
    """
    promotions.delete(platform, tenant, model)
    return http_schemas.Deleted(id=model, object="model")
