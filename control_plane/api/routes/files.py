"""``/v1/files``: upload, look, delete."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, BinaryIO, Literal

from fastapi import APIRouter, Form, Request, UploadFile
from fastapi.responses import StreamingResponse

from control_plane.api import render, schemas
from control_plane.api.deps import PlatformDep, Reader, Writer
from control_plane.service import files
from ft_assets.errors import InvalidRequest
from ft_assets.storable import check_storable

CHUNK_BYTES = 1 << 20

router = APIRouter(prefix="/v1/files", tags=["files"])


@router.post("")
def upload(
    request: Request,
    platform: PlatformDep,
    tenant: Writer,
    file: UploadFile,
    purpose: Annotated[str, Form()],
    column_map: Annotated[str | None, Form(description='For CSV and Parquet: JSON as {"text": "prompt"}, theirs to ours.')] = None,
) -> schemas.File:
    """Upload a dataset. Below 32 MiB it is validated before this answers; above, `status` is `uploaded` until it is."""
    row = files.create(
        platform, tenant, file.file, filename=file.filename or "upload.jsonl", purpose=purpose, column_map=_column_map(column_map)
    )
    if row["status"] == "uploaded":
        request.app.state.validation.enqueue(row["id"])
    return render.file(row)


@router.get("")
def list_files(
    platform: PlatformDep,
    tenant: Reader,
    after: str | None = None,
    limit: int = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: str | None = None,
) -> schemas.ListOf[schemas.File]:
    """Files, newest first."""
    found = files.list_files(platform, tenant, after=after, limit=limit, order=order, purpose=purpose)
    return schemas.ListOf(data=[render.file(r) for r in found.items], has_more=found.has_more)


@router.get("/{file_id}")
def retrieve(platform: PlatformDep, tenant: Reader, file_id: str) -> schemas.File:
    """One file."""
    return render.file(files.get(platform, tenant, file_id))


@router.delete("/{file_id}")
def delete(platform: PlatformDep, tenant: Writer, file_id: str) -> schemas.Deleted:
    """Delete the bytes; refused while a job that has not ended names the file."""
    files.delete(platform, tenant, file_id)
    return schemas.Deleted(id=file_id, object="file")


@router.get("/{file_id}/content", response_class=StreamingResponse)
def content(platform: PlatformDep, tenant: Reader, file_id: str) -> StreamingResponse:
    """The bytes as uploaded."""
    row, stream = files.content(platform, tenant, file_id)
    headers = {"content-length": str(row["bytes"]), "content-disposition": f'attachment; filename="{row["filename"]}"'}
    return StreamingResponse(_chunks(stream), media_type="application/octet-stream", headers=headers)


def _chunks(stream: BinaryIO) -> Iterator[bytes]:
    with stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk


def _column_map(text: str | None) -> dict[str, str] | None:
    if not text:
        return None
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict) or not all(isinstance(v, str) for v in parsed.values()):
        raise InvalidRequest(
            f'column_map {text[:80]!r} is not a JSON object of texts; write {{"their column": "prompt"}}',
            code="invalid_column_map",
            param="column_map",
        )
    check_storable(parsed, "column_map")
    return parsed
