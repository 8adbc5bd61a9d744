"""``/v1/adapters``: look, promote, roll back, deprecate. Ids may be model names, which may hold ``/``."""

from __future__ import annotations

from fastapi import APIRouter

from control_plane.api import render, schemas
from control_plane.api.deps import PlatformDep, Reader, Writer
from control_plane.service import adapters, promotions

router = APIRouter(prefix="/v1/adapters", tags=["adapters"])


@router.get("")
def list_adapters(
    platform: PlatformDep, tenant: Reader, after: str | None = None, limit: int = 20, stage: str | None = None
) -> schemas.ListOf[schemas.Adapter]:
    """Adapters, newest first."""
    found = adapters.list_adapters(platform, tenant, after=after, limit=limit, stage=stage)
    return schemas.ListOf(data=[render.adapter(a) for a in found.items], has_more=found.has_more)


@router.post("/{adapter_id:path}/promote")
def promote(platform: PlatformDep, tenant: Writer, adapter_id: str) -> schemas.Adapter:
    """Put an adapter that passed its gates into production and serve it."""
    return render.adapter(promotions.promote(platform, tenant, adapter_id))


@router.post("/{adapter_id:path}/rollback")
def rollback(platform: PlatformDep, tenant: Writer, adapter_id: str) -> schemas.RolledBack:
    """Serve the one that was in production before it, and withdraw it."""
    done = promotions.rollback(platform, tenant, adapter_id)
    return schemas.RolledBack(withdrawn=render.adapter(done.withdrawn), serving=render.adapter(done.serving))


@router.post("/{adapter_id:path}/deprecate")
def deprecate(platform: PlatformDep, tenant: Writer, adapter_id: str) -> schemas.Adapter:
    """Stop serving an adapter; its files stay for the days of grace."""
    return render.adapter(promotions.deprecate(platform, tenant, adapter_id))


@router.get("/{adapter_id:path}")
def retrieve(platform: PlatformDep, tenant: Reader, adapter_id: str) -> schemas.Adapter:
    """One adapter, by its id or its model name."""
    return render.adapter(adapters.get_adapter(platform, tenant, adapter_id))
