"""``/v1/adapters``: look, trace, approve, promote, roll back, deprecate. Ids may be model names, which may hold ``/``."""

from __future__ import annotations

from fastapi import APIRouter

from control_plane.adapters import approvals, lineage, promotions, responses, schemas
from control_plane.adapters import service as adapters
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import Approver, PlatformDep, Reader, Writer
from control_plane.models import schemas as models_schemas

router = APIRouter(prefix="/v1/adapters", tags=["adapters"])


@router.get("")
def list_adapters(
    platform: PlatformDep,
    tenant: Reader,
    after: str | None = None,
    limit: int = 20,
    stage: str | None = None,
    approval: str | None = None,
) -> http_schemas.ListOf[models_schemas.Adapter]:
    """Adapters, newest first; ``approval=pending`` are those that wait for a person."""
    found = adapters.list_adapters(platform, tenant, after=after, limit=limit, stage=stage, approval=approval)
    return http_schemas.ListOf(data=[responses.adapter(a) for a in found.items], has_more=found.has_more)


@router.post("/{adapter_id:path}/promote")
def promote(platform: PlatformDep, tenant: Writer, adapter_id: str) -> models_schemas.Adapter:
    """Put an adapter that passed its gates into production and serve it."""
    return responses.adapter(promotions.promote(platform, tenant, adapter_id))


@router.post("/{adapter_id:path}/rollback")
def rollback(platform: PlatformDep, tenant: Writer, adapter_id: str) -> models_schemas.RolledBack:
    """Serve the one that was in production before it, and withdraw it."""
    done = promotions.rollback(platform, tenant, adapter_id)
    return models_schemas.RolledBack(withdrawn=responses.adapter(done.withdrawn), serving=responses.adapter(done.serving))


@router.post("/{adapter_id:path}/deprecate")
def deprecate(platform: PlatformDep, tenant: Writer, adapter_id: str) -> models_schemas.Adapter:
    """Stop serving an adapter; its files stay for the days of grace."""
    return responses.adapter(promotions.deprecate(platform, tenant, adapter_id))


@router.post("/{adapter_id:path}/approve")
def approve(
    platform: PlatformDep, principal: Approver, adapter_id: str, body: schemas.Approve | None = None
) -> models_schemas.Adapter:  # fmt: skip
    """Let an adapter be promoted whose job asked for a person's approval; any key that may write can do it."""
    asked, tenant = body or schemas.Approve(note=None, promote=False), principal.tenant.id
    done = approvals.approve(platform, tenant, adapter_id, key_id=principal.key_id, note=asked.note, promote=asked.promote)
    return responses.adapter(done)


@router.post("/{adapter_id:path}/reject")
def reject(
    platform: PlatformDep, principal: Approver, adapter_id: str, body: schemas.Decide | None = None
) -> models_schemas.Adapter:  # fmt: skip
    """Keep an adapter from being promoted."""
    note = None if body is None else body.note
    return responses.adapter(approvals.reject(platform, principal.tenant.id, adapter_id, key_id=principal.key_id, note=note))


@router.get("/{adapter_id:path}/lineage")
def trace(platform: PlatformDep, tenant: Reader, adapter_id: str, verify: bool = False) -> schemas.Lineage:
    """Where an adapter comes from, back to the uploaded files; ``verify`` reads the stored bytes again."""
    return responses.lineage(lineage.of_adapter(platform, tenant, adapter_id, verify=verify))


@router.get("/{adapter_id:path}")
def retrieve(platform: PlatformDep, tenant: Reader, adapter_id: str) -> models_schemas.Adapter:
    """One adapter, by its id or its model name."""
    return responses.adapter(adapters.get_adapter(platform, tenant, adapter_id))
