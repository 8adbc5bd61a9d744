"""``/v1/members``: people of the caller's tenant, and their roles."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from control_plane.http import parameters
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import Admin, AdminPrincipal, PlatformDep
from control_plane.tenants import members, responses, schemas

router = APIRouter(prefix="/v1/members", tags=["members"])


@router.post("", summary="Add a member")
def add(platform: PlatformDep, principal: AdminPrincipal, body: schemas.CreateMember) -> schemas.Member:
    """Add a person to your tenant. To give them a key, set `member_id` in `POST /v1/api_keys`."""
    by_owner = principal.may_name_owners
    return responses.member(members.add(platform, principal.tenant.id, email=body.email, role=body.role, name=body.name, by_owner=by_owner))


@router.get("", summary="List members")
def list_members(
    platform: PlatformDep,
    tenant: Admin,
    after: parameters.After = None,
    limit: parameters.Limit = 20,
    removed: Annotated[bool, Query(description="Include members who were removed.")] = False,
) -> http_schemas.ListOf[schemas.Member]:
    """List the members of your tenant, newest first."""
    found = members.list_members(platform, tenant, after=after, limit=limit, removed=removed)
    return http_schemas.ListOf(data=[responses.member(m) for m in found.items], has_more=found.has_more)


@router.get("/{member_id}", summary="Retrieve a member")
def retrieve(platform: PlatformDep, tenant: Admin, member_id: parameters.MemberId) -> schemas.Member:
    """Return a member, including one who was removed."""
    return responses.member(members.get(platform, tenant, member_id))


@router.post("/{member_id}", summary="Update a member")
def update(platform: PlatformDep, principal: AdminPrincipal, member_id: parameters.MemberId, body: schemas.UpdateMember) -> schemas.Member:
    """Change the role, name or notifications of a member. A lower role restricts the member's keys immediately."""
    asked, by_owner = body.model_dump(), principal.may_name_owners
    return responses.member(members.update(platform, principal.tenant.id, member_id, **asked, by_owner=by_owner))


@router.delete("/{member_id}", summary="Remove a member")
def remove(platform: PlatformDep, principal: AdminPrincipal, member_id: parameters.MemberId) -> schemas.RemovedMember:
    """Remove a member and revoke all of their keys."""
    revoked = members.remove(platform, principal.tenant.id, member_id, by_owner=principal.may_name_owners)
    return schemas.RemovedMember(id=member_id, revoked_keys=revoked)
