"""``/v1/members``: people of the caller's tenant, and their roles."""

from __future__ import annotations

from fastapi import APIRouter

from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import Admin, AdminPrincipal, PlatformDep
from control_plane.tenants import members, responses
from control_plane.tenants.keys import schemas as keys_schemas

router = APIRouter(prefix="/v1/members", tags=["members"])


@router.post("")
def add(platform: PlatformDep, principal: AdminPrincipal, body: keys_schemas.CreateMember) -> keys_schemas.Member:
    """Add a person; keys for it are made with `member_id` in `POST /v1/api_keys`."""
    by_owner = principal.may_name_owners
    return responses.member(members.add(platform, principal.tenant.id, email=body.email, role=body.role, name=body.name, by_owner=by_owner))


@router.get("")
def list_members(
    platform: PlatformDep, tenant: Admin, after: str | None = None, limit: int = 20, removed: bool = False
) -> http_schemas.ListOf[keys_schemas.Member]:
    """Members, newest first; with `removed` those who were, too."""
    found = members.list_members(platform, tenant, after=after, limit=limit, removed=removed)
    return http_schemas.ListOf(data=[responses.member(m) for m in found.items], has_more=found.has_more)


@router.get("/{member_id}")
def retrieve(platform: PlatformDep, tenant: Admin, member_id: str) -> keys_schemas.Member:
    """One member, also one who was removed."""
    return responses.member(members.get(platform, tenant, member_id))


@router.post("/{member_id}")
def update(platform: PlatformDep, principal: AdminPrincipal, member_id: str, body: keys_schemas.UpdateMember) -> keys_schemas.Member:
    """Change role, name or notification; a lower role narrows the member's keys from the next call on."""
    asked, by_owner = body.model_dump(), principal.may_name_owners
    return responses.member(members.update(platform, principal.tenant.id, member_id, **asked, by_owner=by_owner))


@router.delete("/{member_id}")
def remove(platform: PlatformDep, principal: AdminPrincipal, member_id: str) -> keys_schemas.RemovedMember:
    """Remove a member and revoke all keys of theirs."""
    revoked = members.remove(platform, principal.tenant.id, member_id, by_owner=principal.may_name_owners)
    return keys_schemas.RemovedMember(id=member_id, revoked_keys=revoked)
