"""``/v1/api_keys`` and ``/v1/me``: keys of the caller's tenant, and the caller itself."""

from __future__ import annotations

from fastapi import APIRouter

from control_plane.http import parameters
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import Admin, AdminPrincipal, PlatformDep, ReaderPrincipal
from control_plane.tenants import members, responses, schemas
from control_plane.tenants import service as tenants

router = APIRouter(prefix="/v1", tags=["api_keys"])


@router.get("/me", summary="Retrieve the caller")
def me(platform: PlatformDep, principal: ReaderPrincipal) -> schemas.Me:
    """Return the tenant of this API key, its limits, and what the key may do."""
    key = tenants.get_key(platform, principal.tenant.id, principal.key_id)
    person = None if principal.member_id is None else members.get(platform, principal.tenant.id, principal.member_id)
    return responses.me(principal, key, person)


@router.post("/api_keys", summary="Create an API key")
def create(platform: PlatformDep, principal: AdminPrincipal, body: schemas.CreateKey) -> schemas.NewApiKey:
    """Create an API key for your tenant or one of its members. Its secret is returned only here."""
    made = tenants.create_key(
        platform,
        principal.tenant.id,
        name=body.name,
        scopes=body.scopes,
        expires_in_s=body.expires_in,
        member_id=body.member_id,
        requests_per_minute=body.requests_per_minute,
        by=principal,
    )
    return responses.new_api_key(made)


@router.get("/api_keys", summary="List API keys")
def list_keys(
    platform: PlatformDep, tenant: Admin, after: parameters.After = None, limit: parameters.Limit = 100
) -> http_schemas.ListOf[schemas.ApiKey]:
    """List your API keys without their secrets, newest first, including revoked ones."""
    found = tenants.list_keys(platform, tenant, after=after, limit=limit)
    return http_schemas.ListOf(data=[responses.api_key(k) for k in found.items], has_more=found.has_more)


@router.get("/api_keys/{key_id}", summary="Retrieve an API key")
def retrieve(platform: PlatformDep, tenant: Admin, key_id: parameters.KeyId) -> schemas.ApiKey:
    """Return an API key without its secret."""
    return responses.api_key(tenants.get_key(platform, tenant, key_id))


@router.post("/api_keys/{key_id}/rotate", summary="Rotate an API key")
def rotate(
    platform: PlatformDep, principal: AdminPrincipal, key_id: parameters.KeyId, body: schemas.RotateKey | None = None
) -> schemas.NewApiKey:
    """Create a key that replaces this one. The old key keeps working for `overlap` seconds, one day by default."""
    requested = body or schemas.RotateKey()
    made = tenants.rotate_key(
        platform, principal.tenant.id, key_id, overlap_s=requested.overlap, expires_in_s=requested.expires_in, by=principal
    )
    return responses.new_api_key(made)


@router.delete("/api_keys/{key_id}", summary="Revoke an API key")
def revoke(platform: PlatformDep, principal: AdminPrincipal, key_id: parameters.KeyId) -> schemas.ApiKey:
    """Revoke an API key immediately."""
    return responses.api_key(tenants.revoke_key(platform, principal.tenant.id, key_id, by=principal))
