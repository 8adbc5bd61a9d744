"""``/v1/data_export``, ``/v1/data_deletions``, ``/v1/deletions``: everything that a tenant has, exported or deleted, with proofs."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from control_plane.adapters import schemas as adapters_schemas
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import Admin, AdminPrincipal, PlatformDep, Reader
from control_plane.tenant_data import deletion, deletion_requests, export, responses

router = APIRouter(prefix="/v1", tags=["deletions"])


@router.get("/data_export", response_class=StreamingResponse)
def export_data(platform: PlatformDep, tenant: Admin) -> StreamingResponse:
    """Download everything the tenant has as one ZIP archive with a manifest.

    It holds stored objects, records as JSON lines, and `manifest.json` with path, kind, bytes and sha256 of every member; no secrets.
    The manifest comes last: an archive without it is incomplete.
    """
    headers = {"content-disposition": f'attachment; filename="{tenant}-export.zip"'}
    return StreamingResponse(export.archive(platform, tenant), media_type="application/zip", headers=headers)


@router.post("/data_deletions", status_code=202)
def delete_data(platform: PlatformDep, principal: AdminPrincipal, body: adapters_schemas.DeleteData) -> adapters_schemas.Deletion:
    """Delete all data of the tenant: jobs are cancelled, adapters withdrawn, every object deleted. There is no way back."""
    tenant = principal.tenant.id
    asked = deletion_requests.request_tenant(platform, tenant, confirm=body.confirm, reason=body.reason, requested_by=principal.key_id)
    return responses.deletion(asked)


@router.get("/deletions")
def list_deletions(
    platform: PlatformDep, tenant: Reader, after: str | None = None, limit: int = 20
) -> http_schemas.ListOf[adapters_schemas.Deletion]:  # fmt: skip
    """Deletions of adapters and of the tenant's data, newest first; without their proofs."""
    found = deletion.list_deletions(platform, tenant, after=after, limit=limit)
    return http_schemas.ListOf(data=[responses.deletion(row) for row in found.items], has_more=found.has_more)


@router.get("/deletions/{deletion_id}")
def retrieve(platform: PlatformDep, tenant: Reader, deletion_id: str) -> adapters_schemas.Deletion:
    """One deletion, with its proof once it is done."""
    return responses.deletion(deletion.get(platform, tenant, deletion_id))
