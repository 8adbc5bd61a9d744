"""``/v1/adapters/{adapter}/exports``: ask for one, look, download, delete. An adapter is named by its id or its model name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from control_plane.adapters import exports, responses
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import PlatformDep, Reader, Writer
from control_plane.models import schemas as models_schemas

CHUNK_BYTES = 1 << 20

router = APIRouter(prefix="/v1/adapters", tags=["exports"])


@router.post("/{adapter_id:path}/exports")
def create(
    request: Request, platform: PlatformDep, tenant: Writer, adapter_id: str, body: models_schemas.CreateExport
) -> models_schemas.Export:
    """Have an adapter made into files to take along; the same request again gives the same export, and makes nothing."""
    row = exports.request(platform, tenant, adapter_id, format=body.format, precision=body.precision)
    if row["status"] == exports.QUEUED:
        request.app.state.exports.enqueue(row["id"], tenant)
    return responses.export(row)


@router.get("/{adapter_id:path}/exports")
def list_exports(platform: PlatformDep, tenant: Reader, adapter_id: str) -> http_schemas.ListOf[models_schemas.Export]:
    """Exports of an adapter, newest first."""
    return http_schemas.ListOf(data=[responses.export(row) for row in exports.list_exports(platform, tenant, adapter_id)])


@router.get("/{adapter_id:path}/exports/{export_id}")
def retrieve(platform: PlatformDep, tenant: Reader, adapter_id: str, export_id: str) -> models_schemas.Export:
    """One export: `status` is `queued`, `running`, `ready` or `failed`."""
    return responses.export(exports.get(platform, tenant, adapter_id, export_id))


@router.delete("/{adapter_id:path}/exports/{export_id}")
def delete(platform: PlatformDep, tenant: Writer, adapter_id: str, export_id: str) -> http_schemas.Deleted:
    """Delete an export with its archive; one that is being made is given up. Without that, it is kept for seven days."""
    exports.delete(platform, tenant, adapter_id, export_id)
    return http_schemas.Deleted(id=export_id, object="adapter.export")


@router.get("/{adapter_id:path}/exports/{export_id}/content", response_class=StreamingResponse)
def content(platform: PlatformDep, tenant: Reader, adapter_id: str, export_id: str) -> StreamingResponse:
    """The archive: a tar of the files, with a manifest of their hashes."""
    row, stream = exports.content(platform, tenant, adapter_id, export_id)
    name = f"{row['adapter_id']}-{row['format']}{'-' + row['precision'] if row['precision'] else ''}.tar"
    headers = {"content-length": str(row["bytes"]), "content-disposition": f'attachment; filename="{name}"', "x-sha256": row["sha256"]}
    return StreamingResponse(_chunks(stream), media_type="application/x-tar", headers=headers)


def _chunks(stream: BinaryIO) -> Iterator[bytes]:
    with stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk
