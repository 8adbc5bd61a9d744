"""``/v1/members``: people of the caller's tenant, and their roles."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from control_plane.http import parameters
from control_plane.http.authentication import Admin, AdminPrincipal, PlatformDep
from control_plane.http.schemas import ListOf
from control_plane.platform.pagination import Page
from control_plane.tenants import members, schemas
from control_plane.tenants.tables import Member

router = APIRouter(prefix="/v1/members", tags=["members"])


@router.post("", summary="Add a member", response_model=schemas.Member)
def add(platform: PlatformDep, principal: AdminPrincipal, body: schemas.CreateMember) -> Member:
    """Add a person to your tenant. To give them a key, set `member_id` in `POST /v1/api_keys`."""
    return members.add(platform, principal.tenant.id, **body.model_dump(), by_owner=principal.may_name_owners)


@router.get("", summary="List members", response_model=ListOf[schemas.Member])
def list_members(
    platform: PlatformDep,
    tenant: Admin,
    after: parameters.After = None,
    limit: parameters.Limit = 20,
    removed: Annotated[bool, Query(description="Include members who were removed.")] = False,
) -> Page[Member]:
    """List the members of your tenant, newest first."""
    return members.list_members(platform, tenant, after=after, limit=limit, removed=removed)


@router.get("/{member_id}", summary="Retrieve a member", response_model=schemas.Member)
def retrieve(platform: PlatformDep, tenant: Admin, member_id: parameters.MemberId) -> Member:
    """Return a member, including one who was removed."""
    return members.get(platform, tenant, member_id)


@router.post("/{member_id}", summary="Update a member", response_model=schemas.Member)
def update(platform: PlatformDep, principal: AdminPrincipal, member_id: parameters.MemberId, body: schemas.UpdateMember) -> Member:
    """Change the role, name or notifications of a member. A lower role narrows the member's keys at once."""
    return members.update(platform, principal.tenant.id, member_id, **body.model_dump(), by_owner=principal.may_name_owners)


@router.delete("/{member_id}", summary="Remove a member")
def remove(platform: PlatformDep, principal: AdminPrincipal, member_id: parameters.MemberId) -> schemas.RemovedMember:
    """Remove a member and revoke all of their keys."""
    revoked = members.remove(platform, principal.tenant.id, member_id, by_owner=principal.may_name_owners)
    return schemas.RemovedMember(id=member_id, revoked_keys=revoked)
