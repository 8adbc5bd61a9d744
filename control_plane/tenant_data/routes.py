"""``/v1/data_export``, ``/v1/data_deletions`` and ``/v1/deletions``."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from fastapi.responses import StreamingResponse

from control_plane.http import parameters
from control_plane.http.authentication import Admin, AdminPrincipal, PlatformDep, Reader
from control_plane.http.schemas import ListOf
from control_plane.http.turns import Download
from control_plane.platform.pagination import Page
from control_plane.tenant_data import deletion, deletion_requests, export, schemas
from control_plane.tenant_data.tables import Deletion

router = APIRouter(prefix="/v1", tags=["deletions"])


@router.get("/data_export", summary="Export all data of the tenant", response_class=StreamingResponse)
def export_data(platform: PlatformDep, tenant: Admin) -> Download:
    """Download everything the tenant has as one ZIP archive with a manifest.

    It contains stored objects, records as JSON lines, and `manifest.json` with the path, kind, size and SHA-256 of every other file; no
    secrets. The manifest is written last: an archive without it is incomplete.
    """
    headers = {"content-disposition": f'attachment; filename="{tenant}-export.zip"'}
    return Download(export.archive(platform, tenant), media_type="application/zip", headers=headers)


@router.post("/data_deletions", summary="Delete all data of the tenant", status_code=202, response_model=schemas.Deletion)
def delete_data(platform: PlatformDep, principal: AdminPrincipal, body: schemas.DeleteData) -> Deletion:
    """Delete all data of the tenant permanently: jobs are cancelled, adapters withdrawn and every object deleted. This cannot be undone.

    The response is the deletion in progress; `GET /v1/deletions/{deletion_id}` returns its proof once it is done. With `close_account`,
    the account ends at that moment, and the proof is your operator's to send.
    """
    return deletion_requests.request_tenant(
        platform, principal.tenant.id, **body.model_dump(), requested_by=principal.id, by_owner=principal.may_name_owners
    )


@router.get("/deletions", summary="List deletions", response_model=ListOf[schemas.Deletion])
def list_deletions(
    platform: PlatformDep, tenant: Reader, after: parameters.After = None, limit: parameters.Limit = 20
) -> Page[Deletion]:  # fmt: skip
    """List deletions of adapters and of the tenant's data, newest first, without their proofs."""
    return deletion.list_deletions(platform, tenant, after=after, limit=limit)


@router.get("/deletions/{deletion_id}", summary="Retrieve a deletion", response_model=schemas.Deletion)
def retrieve(
    platform: PlatformDep, tenant: Reader, deletion_id: Annotated[str, Path(description="Id of the deletion, as in `GET /v1/deletions`.")]
) -> Deletion:
    """Return a deletion, with its proof once it is done."""
    return deletion.get(platform, tenant, deletion_id)
