"""``/v1/adapters``: get, trace, approve, promote, roll back, deprecate, manifests, signatures. Ids may be model names, which may
contain ``/``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import PlainTextResponse

from control_plane.adapters import adapter_signatures, lineage, manifests, promotions, schemas, signing_keys
from control_plane.adapters import service as adapters
from control_plane.adapters.tables import Adapter
from control_plane.http import parameters
from control_plane.http.authentication import Approver, PlatformDep, Reader, WholePlatform, Writer
from control_plane.http.schemas import ListOf
from control_plane.platform.pagination import Page
from engine.adapters import Envelope

router = APIRouter(prefix="/v1/adapters", tags=["adapters"])
manifests_router = APIRouter(prefix="/v1", tags=["manifests"])
signing_keys_router = APIRouter(prefix="/.well-known", tags=["adapters"])


@router.get("", summary="List adapters", response_model=ListOf[schemas.Adapter])
def list_adapters(
    platform: PlatformDep,
    tenant: Reader,
    after: parameters.After = None,
    limit: parameters.Limit = 20,
    stage: Annotated[
        str | None,
        Query(
            description="Return only adapters in this stage: `draft`, `staging`, `production`, `quarantined`, `deprecated` or `archived`."
        ),
    ] = None,
    approval: Annotated[
        str | None, Query(description="Return only adapters with this approval: `none`, `pending`, `approved` or `rejected`.")
    ] = None,
) -> Page[Adapter]:
    """List your adapters, newest first."""
    return adapters.list_adapters(platform, tenant, after=after, limit=limit, stage=stage, approval=approval)


@router.post("/{adapter_id:path}/promote", summary="Promote an adapter", response_model=schemas.Adapter)
def promote(platform: PlatformDep, tenant: Writer, adapter_id: parameters.AdapterId) -> Adapter:
    """Promote an adapter that passed its evaluation to production and serve it. Promoting it again changes nothing."""
    return promotions.promote(platform, tenant, adapter_id)


@router.post("/{adapter_id:path}/rollback", summary="Roll back an adapter", response_model=schemas.RolledBack)
def rollback(platform: PlatformDep, tenant: Writer, adapter_id: parameters.AdapterId) -> promotions.RolledBack:
    """Withdraw an adapter from production and serve the one that was in production before it."""
    return promotions.rollback(platform, tenant, adapter_id)


@router.post("/{adapter_id:path}/deprecate", summary="Deprecate an adapter", response_model=schemas.Adapter)
def deprecate(platform: PlatformDep, tenant: Writer, adapter_id: parameters.AdapterId) -> Adapter:
    """Stop serving an adapter. Its files are kept for 30 days, during which it can be promoted again."""
    return promotions.deprecate(platform, tenant, adapter_id)


@router.post("/{adapter_id:path}/approve", summary="Approve an adapter", response_model=schemas.Adapter)
def approve(
    platform: PlatformDep, principal: Approver, adapter_id: parameters.AdapterId, body: schemas.Approve | None = None
) -> Adapter:  # fmt: skip
    """Approve an adapter whose job requires approval, so that it can be promoted. Needs a key with scope `write`."""
    requested, tenant = body or schemas.Approve(note=None, promote=False), principal.tenant.id
    return promotions.approve(platform, tenant, adapter_id, by=principal.id, note=requested.note, and_promote=requested.promote)


@router.post("/{adapter_id:path}/reject", summary="Reject an adapter", response_model=schemas.Adapter)
def reject(
    platform: PlatformDep, principal: Approver, adapter_id: parameters.AdapterId, body: schemas.Decide | None = None
) -> Adapter:  # fmt: skip
    """Reject an adapter, so that it cannot be promoted. An adapter in production must be rolled back or deprecated instead."""
    note = None if body is None else body.note
    return promotions.reject(platform, principal.tenant.id, adapter_id, by=principal.id, note=note)


@router.get("/{adapter_id:path}/lineage", summary="Trace the lineage of an adapter", response_model=schemas.Lineage)
def trace(platform: PlatformDep, tenant: Reader, adapter_id: parameters.AdapterId, verify: parameters.Verify = False) -> lineage.Json:
    """Trace an adapter back to the uploaded files it was trained on. With `verify`, all stored bytes are checked as well."""
    return lineage.of_adapter(platform, tenant, adapter_id, verify=verify)


@router.get("/{adapter_id:path}/signature", summary="Retrieve the signature of an adapter", response_model=schemas.Signature)
def signature(platform: PlatformDep, tenant: Reader, adapter_id: parameters.AdapterId) -> Envelope:
    """Return the platform's signature over an adapter's manifest and files, made within a minute of its registration."""
    return adapter_signatures.signature(platform, tenant, adapter_id)


@router.get("/{adapter_id:path}", summary="Retrieve an adapter", response_model=schemas.Adapter)
def retrieve(platform: PlatformDep, tenant: Reader, adapter_id: parameters.AdapterId) -> Adapter:
    """Return an adapter."""
    return adapters.get_adapter(platform, tenant, adapter_id)


@signing_keys_router.get("/ft-signing-keys.json", summary="List the platform's public keys", response_model=schemas.SigningKeySet)
def list_signing_keys(platform: WholePlatform) -> Mapping[str, Any]:
    """Return the public keys that verify signatures of adapters and exports, as a JSON Web Key Set. Needs no API key."""
    return signing_keys.published(platform)


class Yaml(PlainTextResponse):
    media_type = "application/yaml"


@manifests_router.get("/adapters/{adapter_id:path}/server", summary="Generate manifests to serve a whole model", response_class=Yaml)
def server(platform: PlatformDep, tenant: Reader, adapter_id: parameters.AdapterId) -> Yaml:
    """Generate Kubernetes manifests for serving a whole model: Deployment, Service and NetworkPolicy."""
    return Yaml(manifests.server(platform, tenant, adapter_id))


@manifests_router.get("/model_routes/{name}/rewrite", summary="Generate a manifest for a model route", response_class=Yaml)
def rewrite(platform: PlatformDep, tenant: Reader, name: parameters.RouteName) -> Yaml:
    """Generate a model route as an InferenceModelRewrite manifest for llm-d."""
    return Yaml(manifests.route(platform, tenant, name))
