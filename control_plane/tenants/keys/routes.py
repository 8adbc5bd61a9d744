"""``/v1/api_keys`` and ``/v1/me``: keys of the caller's own tenant, and who the caller is."""

from __future__ import annotations

from fastapi import APIRouter

from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import Admin, AdminPrincipal, PlatformDep, ReaderPrincipal
from control_plane.tenants import members, responses
from control_plane.tenants import service as tenants
from control_plane.tenants.keys import schemas

router = APIRouter(prefix="/v1", tags=["api_keys"])


@router.get("/me")
def me(platform: PlatformDep, principal: ReaderPrincipal) -> schemas.Me:
    """The tenant of the key that was sent, its limits, and what the key opens."""
    key = tenants.get_key(platform, principal.tenant.id, principal.key_id)
    person = None if principal.member_id is None else members.get(platform, principal.tenant.id, principal.member_id)
    return responses.me(principal, key, person)


@router.post("/api_keys")
def create(platform: PlatformDep, principal: AdminPrincipal, body: schemas.CreateKey) -> schemas.NewApiKey:
    """Make a key, of the tenant or of a member; its secret is in this answer and nowhere else."""
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


@router.get("/api_keys")
def list_keys(platform: PlatformDep, tenant: Admin, after: str | None = None, limit: int = 100) -> http_schemas.ListOf[schemas.ApiKey]:
    """Keys, newest first, revoked ones too; never their secrets."""
    found = tenants.list_keys(platform, tenant, after=after, limit=limit)
    return http_schemas.ListOf(data=[responses.api_key(k) for k in found.items], has_more=found.has_more)


@router.get("/api_keys/{key_id}")
def retrieve(platform: PlatformDep, tenant: Admin, key_id: str) -> schemas.ApiKey:
    """One key, without its secret."""
    return responses.api_key(tenants.get_key(platform, tenant, key_id))


@router.post("/api_keys/{key_id}/rotate")
def rotate(platform: PlatformDep, principal: AdminPrincipal, key_id: str, body: schemas.RotateKey | None = None) -> schemas.NewApiKey:
    """Make a key in the place of this one, which still opens for `overlap` seconds: a day, unless you say otherwise."""
    asked = body or schemas.RotateKey()
    made = tenants.rotate_key(platform, principal.tenant.id, key_id, overlap_s=asked.overlap, expires_in_s=asked.expires_in, by=principal)
    return responses.new_api_key(made)


@router.delete("/api_keys/{key_id}")
def revoke(platform: PlatformDep, principal: AdminPrincipal, key_id: str) -> schemas.ApiKey:
    """End a key at once."""
    return responses.api_key(tenants.revoke_key(platform, principal.tenant.id, key_id, by=principal))
