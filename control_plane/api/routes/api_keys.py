"""``/v1/api_keys``: keys of the caller's own tenant."""

from __future__ import annotations

from fastapi import APIRouter

from control_plane.api import render, schemas
from control_plane.api.deps import Admin, PlatformDep
from control_plane.service import tenants
from ft_assets.storable import check_storable

router = APIRouter(prefix="/v1/api_keys", tags=["api_keys"])


@router.post("")
def create(platform: PlatformDep, tenant: Admin, body: schemas.CreateKey) -> schemas.NewApiKey:
    """Make a key; its secret is in this answer and nowhere else."""
    check_storable(body.name, "name")
    return render.new_api_key(tenants.create_key(platform, tenant, name=body.name, scopes=body.scopes, expires_in_s=body.expires_in))


@router.get("")
def list_keys(platform: PlatformDep, tenant: Admin) -> schemas.ListOf[schemas.ApiKey]:
    """Keys, newest first, revoked ones too; never their secrets."""
    return schemas.ListOf(data=[render.api_key(k) for k in tenants.list_keys(platform, tenant)])


@router.delete("/{key_id}")
def revoke(platform: PlatformDep, tenant: Admin, key_id: str) -> schemas.ApiKey:
    """End a key at once."""
    return render.api_key(tenants.revoke_key(platform, tenant, key_id))
