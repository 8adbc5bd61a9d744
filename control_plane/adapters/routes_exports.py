"""``/v1/adapters/{adapter}/exports``: request, get, download, delete. An adapter is named by its id or its model name."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from control_plane.adapters import exports, schemas
from control_plane.adapters.tables import Export
from control_plane.http import parameters
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import PlatformDep, Reader, Writer
from control_plane.http.turns import Download, run_waiting
from control_plane.platform.pagination import Page
from control_plane.platform.transfer import in_pieces

router = APIRouter(prefix="/v1/adapters", tags=["exports"])


@router.post("/{adapter_id:path}/exports", summary="Create an export", response_model=schemas.Export)
def create(platform: PlatformDep, tenant: Writer, adapter_id: parameters.AdapterId, body: schemas.CreateExport) -> Export:
    """Export an adapter as an archive of files. Requesting the same export again returns the existing one."""
    return exports.request(platform, tenant, adapter_id, format=body.format, precision=body.precision)


@router.get("/{adapter_id:path}/exports", summary="List the exports of an adapter", response_model=http_schemas.ListOf[schemas.Export])
def list_exports(platform: PlatformDep, tenant: Reader, adapter_id: parameters.AdapterId) -> Page[Export]:
    """List the exports of an adapter, newest first."""
    return Page(items=exports.list_exports(platform, tenant, adapter_id), has_more=False)


@router.get("/{adapter_id:path}/exports/{export_id}", summary="Retrieve an export", response_model=schemas.Export)
def retrieve(platform: PlatformDep, tenant: Reader, adapter_id: parameters.AdapterId, export_id: parameters.ExportId) -> Export:
    """Return an export with its status and progress."""
    return exports.get(platform, tenant, adapter_id, export_id)


@router.delete("/{adapter_id:path}/exports/{export_id}", summary="Delete an export")
def delete(platform: PlatformDep, tenant: Writer, adapter_id: parameters.AdapterId, export_id: parameters.ExportId) -> http_schemas.Deleted:
    """Delete an export and its archive, or cancel it if it is still running. Exports are deleted automatically after seven days."""
    exports.delete(platform, tenant, adapter_id, export_id)
    return http_schemas.Deleted(id=export_id, object="adapter.export")


@router.get("/{adapter_id:path}/exports/{export_id}/content", summary="Download an export", response_class=StreamingResponse)
async def content(
    request: Request, platform: PlatformDep, tenant: Reader, adapter_id: parameters.AdapterId, export_id: parameters.ExportId
) -> Download:
    """Download the archive of a finished export: a tar of its files with a manifest of their hashes."""
    found, stream = await run_waiting(request, partial(exports.content, platform, tenant, adapter_id, export_id))
    name = f"{'-'.join(filter(None, (found.adapter_id, found.format, found.precision)))}.tar"
    headers = {"content-length": str(found.bytes), "content-disposition": f'attachment; filename="{name}"', "x-sha256": str(found.sha256)}
    return Download(in_pieces(stream), media_type="application/x-tar", headers=headers)
