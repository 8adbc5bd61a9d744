"""``/v1/audit_log``: what changed in the caller's tenant, by whom, from where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Query

from control_plane.http import parameters
from control_plane.http.authentication import Admin, PlatformDep
from control_plane.http.schemas import ListOf
from control_plane.platform.pagination import Page
from control_plane.tenants import audit_log as audit
from control_plane.tenants import schemas
from control_plane.tenants.tables import AuditLine

router = APIRouter(prefix="/v1/audit_log", tags=["audit_log"])


@dataclass(frozen=True, kw_only=True)
class Filters(audit.Wanted):
    """The filters of a query."""

    object_id: Annotated[str | None, Query(description="Return only changes of the object with this id.")] = None
    object_type: Annotated[str | None, Query(description="Return only changes of objects of this type, such as `job` or `api_key`.")] = None
    action: Annotated[str | None, Query(description="Return only changes with this action, such as `job.updated`.")] = None
    actor: Annotated[
        str | None,
        Query(description="Return only changes made by the API key, the member (with any of their keys) or the operator with this id."),
    ] = None
    since_s: Annotated[
        int | None, Query(alias="created[gte]", description="Return only changes made at this Unix time in seconds or later.")
    ] = None
    before_s: Annotated[
        int | None, Query(alias="created[lt]", description="Return only changes made before this Unix time in seconds.")
    ] = None


Wanted = Annotated[Filters, Depends()]


@router.get("", summary="List the audit log", response_model=ListOf[schemas.AuditLine])
def list_lines(
    platform: PlatformDep, tenant: Admin, requested: Wanted, after: parameters.After = None, limit: parameters.Limit = 20
) -> Page[AuditLine]:
    """List changes in your tenant, newest first: who changed what, from where, and the old and new values."""
    return audit.read(platform, tenant, requested, after=after, limit=limit)
