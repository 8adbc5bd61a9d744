"""``/v1/uploads``: large files in parts of up to 64 MiB; after an interruption, clients list the stored parts and send the others."""

from __future__ import annotations

import functools

from anyio.lowlevel import RunVar
from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool

from control_plane.datasets import responses
from control_plane.datasets.tables import File, UploadPart
from control_plane.datasets.uploads import multipart_uploads, schemas, uploaded_files
from control_plane.http import forms, parameters
from control_plane.http.authentication import PlatformDep, Reader, Writer
from control_plane.http.rate_limits import JoinLimiter
from control_plane.http.turns import give_up_turn
from core.storable_text import check_storable

MAX_JOINING = 16
"""Threads for calls that join, or wait for another call's join; they handle no other requests."""
MAX_JOINS_EACH = 2

router = APIRouter(prefix="/v1/uploads", tags=["uploads"])
_joining: RunVar[JoinLimiter] = RunVar("_joining")

PART = {
    "type": "object",
    "required": ["data"],
    "properties": {
        "data": {"type": "string", "contentMediaType": "application/octet-stream", "description": "Content of the part, 1 byte to 64 MiB."}
    },
}


@router.post("", summary="Create an upload")
def create(platform: PlatformDep, tenant: Writer, body: schemas.CreateUpload) -> schemas.Upload:
    """Announce a file to upload in parts. Anything the file would be refused for (size, purpose, policies, model) is refused now."""
    requested = body.model_dump()
    check_storable(requested)
    requested["policies"] = forms.with_reading(requested["policies"], encoding=requested.pop("encoding"), rows_at=requested.pop("rows_at"))
    requested["num_bytes"], requested["expires_after_s"] = requested.pop("bytes"), forms.expires_after_s(requested.pop("expires_after"))
    return _upload(multipart_uploads.create(platform, tenant, **requested))


@router.get("/{upload_id}", summary="Retrieve an upload")
def retrieve(platform: PlatformDep, tenant: Reader, upload_id: parameters.UploadId) -> schemas.UploadWithParts:
    """Return an upload with the parts stored so far and their SHA-256, so that an interrupted client knows which parts are missing."""
    view = multipart_uploads.get(platform, tenant, upload_id)
    return schemas.UploadWithParts.of(_upload(view), parts=view.parts)


@router.post(
    "/{upload_id}/parts",
    summary="Add a part to an upload",
    response_model=schemas.UploadPart,
    openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": PART}}}},
)
async def add_part(request: Request, platform: PlatformDep, tenant: Writer, upload_id: parameters.UploadId) -> UploadPart:
    """Store a part of 1 byte to 64 MiB. Parts may be sent in parallel; sending the same bytes again returns the same part."""
    await run_in_threadpool(multipart_uploads.open_upload, platform, tenant, upload_id)  # checked before the body is read
    form = forms.Form(request, file_field="data")
    await form.to_file()
    part = await form.store(lambda stream: multipart_uploads.add_part(platform, tenant, upload_id, stream), tenant=tenant)
    await form.rest()
    return part


@router.post("/{upload_id}/complete", summary="Complete an upload")
async def complete(
    request: Request, platform: PlatformDep, tenant: Writer, upload_id: parameters.UploadId, body: schemas.CompleteUpload
) -> schemas.Upload:
    """Join the parts, in the order of `part_ids`, into a file, which is then validated. Completing again returns the same file."""
    view = await run_in_threadpool(multipart_uploads.get, platform, tenant, upload_id)
    await give_up_turn(request)
    if view.status != multipart_uploads.COMPLETED:
        requested = functools.partial(multipart_uploads.complete, platform, tenant, upload_id, part_ids=body.part_ids, md5=body.md5)
        view = await _join_limiter().run(tenant, upload_id, requested)
    file = view.file and await run_in_threadpool(uploaded_files.wait_for_upload, platform, view.file)
    return _upload(view, file=file)


@router.post("/{upload_id}/cancel", summary="Cancel an upload")
def cancel(platform: PlatformDep, tenant: Writer, upload_id: parameters.UploadId) -> schemas.Upload:
    """Cancel an upload that is not completed and remove its parts."""
    return _upload(multipart_uploads.cancel(platform, tenant, upload_id))


def _upload(view: multipart_uploads.View, *, file: File | None = None) -> schemas.Upload:
    made, is_done = file or view.file, view.status == multipart_uploads.COMPLETED
    return schemas.Upload.of(
        view.row,
        status=view.status,
        received_bytes=view.row.bytes if is_done else sum(part.bytes for part in view.parts),
        file=None if made is None else responses.file(made),
    )


def _join_limiter() -> JoinLimiter:
    try:
        return _joining.get()
    except LookupError:
        _joining.set(made := JoinLimiter(total=MAX_JOINING, each=MAX_JOINS_EACH))
        return made
