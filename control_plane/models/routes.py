"""``/v1/models``: base models, model routes and the tenant's adapters. Ids may contain ``/`` and ``:``."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import FileResponse
from fastapi.routing import APIRoute

from control_plane.adapters import lineage, promotions
from control_plane.adapters import routes as adapters
from control_plane.adapters import schemas as adapters_schemas
from control_plane.adapters.tables import Adapter
from control_plane.http import parameters
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import PlatformDep, Reader, Writer
from control_plane.models import schemas
from control_plane.models import service as models
from control_plane.platform.pagination import Page

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.get("", summary="List models", response_model=http_schemas.ListOf[schemas.Model])
def list_models(
    platform: PlatformDep,
    tenant: Reader,
    type: Annotated[
        str | None, Query(description="Return only models of this type: `base_model`, `lora_adapter`, `full_model` or `model_route`.")
    ] = None,
    base_model: Annotated[str | None, Query(description="Return only this base model, and the adapters and routes based on it.")] = None,
) -> Page[models.Model]:
    """List base models, then your model routes, then your adapters, newest first."""
    return Page(items=models.list_models(platform, tenant, type=type, base_model=base_model), has_more=False)


@router.post("/{model:path}/deploy", summary="Deploy an adapter", response_model=adapters_schemas.Adapter)
def deploy(platform: PlatformDep, tenant: Writer, model: parameters.ModelName, body: schemas.Deploy | None = None) -> Adapter:
    """Promote an adapter to production, or hold it in staging, where it is not served."""
    return promotions.deploy(platform, tenant, model, stage="production" if body is None else body.stage)


for route in adapters.router.routes:
    if isinstance(route, APIRoute) and route.methods == {"POST"}:
        path = route.path.removeprefix(adapters.router.prefix)
        router.add_api_route(path, route.endpoint, methods=["POST"], summary=route.summary, response_model=route.response_model)


@router.get("/{model:path}/lineage", summary="Trace the lineage of a model", response_model=adapters_schemas.Lineage)
def trace(platform: PlatformDep, tenant: Reader, model: parameters.ModelName, verify: parameters.Verify = False) -> lineage.Json:
    """Trace a model back to the uploaded files it was trained on. With `verify`, all stored bytes are checked as well."""
    return lineage.of_model(platform, tenant, model, verify=verify)


@router.get("/{model:path}/tokenizer", summary="Download a tokenizer", response_class=FileResponse)
def tokenizer(platform: PlatformDep, tenant: Reader, model: parameters.ModelName) -> FileResponse:
    """Download the tokenizer and the chat template of a base model as a ZIP archive, to check and preview files before you upload them."""
    del tenant  # of every tenant alike
    return FileResponse(models.tokenizer_archive(platform, model), media_type="application/zip")


@router.get("/{model:path}", summary="Retrieve a model", response_model=schemas.Model)
def retrieve(platform: PlatformDep, tenant: Reader, model: parameters.ModelName) -> models.Model:
    """Return a base model, a model route or one of your adapters."""
    return models.get(platform, tenant, model)


@router.delete("/{model:path}", summary="Delete a fine-tuned model")
def delete(platform: PlatformDep, tenant: Writer, model: parameters.ModelName) -> http_schemas.Deleted:
    """Stop serving a fine-tuned model. Its files are kept for 30 days, during which it can be promoted again.

    Deleting it again changes nothing. Base models cannot be deleted; to delete a model route, use `DELETE /v1/model_routes/{name}`.
    """
    promotions.delete(platform, tenant, model)
    return http_schemas.Deleted(id=model, object="model")
