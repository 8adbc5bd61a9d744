"""``/v1/api_keys`` and ``/v1/me``: keys of the caller's tenant, and the caller itself."""

from __future__ import annotations

from fastapi import APIRouter

from control_plane.http import parameters
from control_plane.http.authentication import Admin, AdminPrincipal, PlatformDep, ReaderPrincipal
from control_plane.http.schemas import ListOf
from control_plane.platform.pagination import Page
from control_plane.tenants import members, schemas
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Scope
from control_plane.tenants.tables import ApiKey

router = APIRouter(prefix="/v1", tags=["api_keys"])


@router.get("/me", summary="Retrieve the caller")
def me(platform: PlatformDep, principal: ReaderPrincipal) -> schemas.Me:
    """Return the tenant of this API key, its limits, and what the key may do."""
    tenant = principal.tenant
    return schemas.Me.model_validate({
        "tenant_id": tenant.id, "tenant_name": tenant.name, "tier": tenant.tier, "limits": tenant,
        "key": principal.key_id and tenants.get_key(platform, tenant.id, principal.key_id),
        "scopes": [s for s in Scope if s in principal.scopes],
        "requests_per_minute": principal.requests_per_minute,
        "member": None if principal.member_id is None else members.get(platform, tenant.id, principal.member_id),
    })  # fmt: skip


@router.post("/api_keys", summary="Create an API key", response_model=schemas.NewApiKey)
def create(platform: PlatformDep, principal: AdminPrincipal, body: schemas.CreateKey) -> tenants.NewKey:
    """Create an API key for your tenant or one of its members. Its secret is returned only here."""
    return tenants.create_key(
        platform, principal.tenant.id, **body.model_dump(exclude={"expires_in"}), expires_in_s=body.expires_in, by=principal
    )


@router.get("/api_keys", summary="List API keys", response_model=ListOf[schemas.ApiKey])
def list_keys(platform: PlatformDep, tenant: Admin, after: parameters.After = None, limit: parameters.Limit = 100) -> Page[ApiKey]:
    """List your API keys without their secrets, newest first, including revoked ones."""
    return tenants.list_keys(platform, tenant, after=after, limit=limit)


@router.get("/api_keys/{key_id}", summary="Retrieve an API key", response_model=schemas.ApiKey)
def retrieve(platform: PlatformDep, tenant: Admin, key_id: parameters.KeyId) -> ApiKey:
    """Return an API key without its secret."""
    return tenants.get_key(platform, tenant, key_id)


@router.post("/api_keys/{key_id}/rotate", summary="Rotate an API key", response_model=schemas.NewApiKey)
def rotate(
    platform: PlatformDep, principal: AdminPrincipal, key_id: parameters.KeyId, body: schemas.RotateKey | None = None
) -> tenants.NewKey:
    """Create a key that replaces this one. The old key keeps working for `overlap` seconds, one day by default."""
    requested = body or schemas.RotateKey()
    return tenants.rotate_key(
        platform, principal.tenant.id, key_id, overlap_s=requested.overlap, expires_in_s=requested.expires_in, by=principal
    )


@router.delete("/api_keys/{key_id}", summary="Revoke an API key", response_model=schemas.ApiKey)
def revoke(platform: PlatformDep, principal: AdminPrincipal, key_id: parameters.KeyId) -> ApiKey:
    """Revoke an API key immediately."""
    return tenants.revoke_key(platform, principal.tenant.id, key_id, by=principal)
