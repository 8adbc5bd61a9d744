"""``/v1/adapters``: get, trace, approve, promote, roll back, deprecate. Ids may be model names, which may contain ``/``."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from control_plane.adapters import lineage, promotions, responses, schemas
from control_plane.adapters import service as adapters
from control_plane.http import parameters
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import Approver, PlatformDep, Reader, Writer

router = APIRouter(prefix="/v1/adapters", tags=["adapters"])


@router.get("", summary="List adapters")
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
) -> http_schemas.ListOf[schemas.Adapter]:
    """List your adapters, newest first."""
    found = adapters.list_adapters(platform, tenant, after=after, limit=limit, stage=stage, approval=approval)
    return http_schemas.ListOf(data=[responses.adapter(a) for a in found.items], has_more=found.has_more)


@router.post("/{adapter_id:path}/promote", summary="Promote an adapter")
def promote(platform: PlatformDep, tenant: Writer, adapter_id: parameters.AdapterId) -> schemas.Adapter:
    """Promote an adapter that passed its evaluation to production and serve it. Promoting it again changes nothing."""
    return responses.adapter(promotions.promote(platform, tenant, adapter_id))


@router.post("/{adapter_id:path}/rollback", summary="Roll back an adapter")
def rollback(platform: PlatformDep, tenant: Writer, adapter_id: parameters.AdapterId) -> schemas.RolledBack:
    """Withdraw an adapter from production and serve the one that was in production before it."""
    done = promotions.rollback(platform, tenant, adapter_id)
    return schemas.RolledBack(withdrawn=responses.adapter(done.withdrawn), serving=responses.adapter(done.serving))


@router.post("/{adapter_id:path}/deprecate", summary="Deprecate an adapter")
def deprecate(platform: PlatformDep, tenant: Writer, adapter_id: parameters.AdapterId) -> schemas.Adapter:
    """Stop serving an adapter. Its files are kept for 30 days, during which it can be promoted again."""
    return responses.adapter(promotions.deprecate(platform, tenant, adapter_id))


@router.post("/{adapter_id:path}/approve", summary="Approve an adapter")
def approve(
    platform: PlatformDep, principal: Approver, adapter_id: parameters.AdapterId, body: schemas.Approve | None = None
) -> schemas.Adapter:  # fmt: skip
    """Approve an adapter whose job requires approval, so that it can be promoted. Needs a key with scope `write`."""
    requested, tenant = body or schemas.Approve(note=None, promote=False), principal.tenant.id
    done = promotions.approve(platform, tenant, adapter_id, key_id=principal.key_id, note=requested.note, and_promote=requested.promote)
    return responses.adapter(done)


@router.post("/{adapter_id:path}/reject", summary="Reject an adapter")
def reject(
    platform: PlatformDep, principal: Approver, adapter_id: parameters.AdapterId, body: schemas.Decide | None = None
) -> schemas.Adapter:  # fmt: skip
    """Reject an adapter, so that it cannot be promoted. An adapter in production must be rolled back or deprecated instead."""
    note = None if body is None else body.note
    return responses.adapter(promotions.reject(platform, principal.tenant.id, adapter_id, key_id=principal.key_id, note=note))


@router.get("/{adapter_id:path}/lineage", summary="Trace the lineage of an adapter")
def trace(platform: PlatformDep, tenant: Reader, adapter_id: parameters.AdapterId, verify: parameters.Verify = False) -> schemas.Lineage:
    """Trace an adapter back to the uploaded files it was trained on. With `verify`, all stored bytes are checked as well."""
    return responses.lineage(lineage.of_adapter(platform, tenant, adapter_id, verify=verify))


@router.get("/{adapter_id:path}", summary="Retrieve an adapter")
def retrieve(platform: PlatformDep, tenant: Reader, adapter_id: parameters.AdapterId) -> schemas.Adapter:
    """Return an adapter."""
    return responses.adapter(adapters.get_adapter(platform, tenant, adapter_id))
