"""``/v1/audit_log``: what was changed in the caller's tenant, by whom, from where."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import Admin, PlatformDep
from control_plane.tenants import responses
from control_plane.tenants.audit import schemas
from control_plane.tenants.audit import service as audit

router = APIRouter(prefix="/v1/audit_log", tags=["audit_log"])


def wanted(
    object_id: str | None = None,
    object_type: str | None = None,
    action: str | None = None,
    actor: Annotated[str | None, Query(description="Id of a key, of a member (all their keys), or of an operator.")] = None,
    since: Annotated[int | None, Query(alias="created[gte]", description="Unix seconds.")] = None,
    before: Annotated[int | None, Query(alias="created[lt]", description="Unix seconds.")] = None,
) -> audit.Wanted:
    """The filters of a query."""
    return audit.Wanted(object_id=object_id, object_type=object_type, action=action, actor=actor, since_s=since, before_s=before)


Wanted = Annotated[audit.Wanted, Depends(wanted)]


@router.get("")
def list_lines(
    platform: PlatformDep, tenant: Admin, asked: Wanted, after: str | None = None, limit: int = 20
) -> http_schemas.ListOf[schemas.AuditLine]:
    """Every change, newest first: who made it, of what, from where, and what it changed."""
    return listed(audit.read(platform, tenant, asked, after=after, limit=limit))


def listed(found: audit.Lines) -> http_schemas.ListOf[schemas.AuditLine]:
    return http_schemas.ListOf(data=[responses.audit_line(line) for line in found.items], has_more=found.has_more)
