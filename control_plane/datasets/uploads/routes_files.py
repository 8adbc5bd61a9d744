"""``/v1/files``: upload, look, delete."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, BinaryIO, Literal

import anyio
from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from control_plane.datasets import responses
from control_plane.datasets import schemas as datasets_schemas
from control_plane.datasets.schemas import ENCODING_HELP
from control_plane.datasets.uploads import uploaded_files
from control_plane.http import forms, multipart_body
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import FollowerDep, PlatformDep, Reader, Writer
from control_plane.http.streams import server_sent
from control_plane.platform.context import Platform

CHUNK_BYTES = 1 << 20

router = APIRouter(prefix="/v1/files", tags=["files"])


FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "purpose": {"type": "string", "enum": ["fine-tune"]},
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "column_map": {"type": "string", "description": 'For CSV and Parquet: JSON as {"text": "prompt"}, theirs to ours.'},
        "policies": {"type": "string", "description": 'Checks and what follows from them: JSON as {"pii": "redact"}.'},
        "encoding": {"type": "string", "description": ENCODING_HELP},
        "rows_at": {"type": "string", "description": "Key of the rows, in a file that is one JSON object."},
        "model": {"type": "string", "description": "Base model: counts tokens and finds its control tokens."},
        "expires_after[anchor]": {"type": "string", "enum": [forms.ANCHOR]},
        "expires_after[seconds]": {
            "type": "integer", "minimum": forms.MIN_EXPIRY_S, "maximum": forms.MAX_EXPIRY_S,
            "description": "The file is deleted so long after its upload; never, if it is left out.",
        },
    },
}  # fmt: skip


@router.post("", openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": FORM}}}})
async def upload(request: Request, platform: PlatformDep, tenant: Writer) -> datasets_schemas.File:
    """Upload a dataset. Below 32 MiB (compressed: 2 MiB) this waits up to 45 s for its validation; else `status` is `uploaded`.

    Then `/events` tells when it has become `processed` or `error`. Send the fields before the file: they are then checked before
    it is. The client's `extra_body={"policies": {"pii": "redact"}}` arrives as `policies[pii]`, and is read, too. Above 64 MiB
    use `/v1/uploads`, which goes on where a connection broke.
    """
    form = multipart_body.Form(request, file_field="file")
    await form.to_file()
    if form.fields.get("purpose"):
        await run_in_threadpool(uploaded_files.check_request, platform, **_checked(_asked(form.fields)))
    name = form.filename or "upload.jsonl"
    stored = await form.store(lambda stream: uploaded_files.store(platform, tenant, stream, filename=name), tenant=tenant)
    try:
        await form.rest()
        asked = _asked(form.fields)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await run_in_threadpool(uploaded_files.discard, platform, tenant, stored)
        raise
    row = await run_in_threadpool(lambda: uploaded_files.register(platform, tenant, stored, **asked))
    return responses.file(row if row["status"] != "uploaded" else await run_in_threadpool(request.app.state.validation.take, row))


def _asked(fields: Mapping[str, str]) -> dict[str, Any]:
    """What the form asks for, as the service takes it."""
    if not fields.get("purpose"):
        raise multipart_body.missing("purpose")
    seconds = forms.expires_after_s(forms.spread(fields, "expires_after"))
    return {
        "purpose": fields["purpose"],
        "column_map": forms.column_map(fields.get("column_map"), fields),
        "policies": forms.policies(fields.get("policies"), fields),
        "model": fields.get("model") or None,
        "expires_after": None if seconds is None else timedelta(seconds=seconds),
    }


def _checked(asked: Mapping[str, Any]) -> dict[str, Any]:
    return {name: asked[name] for name in ("purpose", "policies", "model")}


@router.get("")
def list_files(
    platform: PlatformDep,
    tenant: Reader,
    after: str | None = None,
    limit: int = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: str | None = None,
) -> http_schemas.ListOf[datasets_schemas.File]:
    """Files, newest first."""
    found = uploaded_files.list_files(platform, tenant, after=after, limit=limit, order=order, purpose=purpose)
    return http_schemas.ListOf(data=[responses.file(r) for r in found.items], has_more=found.has_more)


@router.get("/{file_id}")
def retrieve(platform: PlatformDep, tenant: Reader, file_id: str) -> datasets_schemas.File:
    """One file."""
    return responses.file(uploaded_files.get(platform, tenant, file_id))


@router.get("/{file_id}/events", response_class=StreamingResponse)
def events(platform: PlatformDep, tenant: Reader, follower: FollowerDep, file_id: str) -> StreamingResponse:
    """Server-sent events of a validation: one for each change of its progress, at most one a second, until it has ended."""
    uploaded_files.get(platform, tenant, file_id)  # a stream that cannot begin is an error, not an empty stream
    return server_sent(_Changes(platform, tenant, file_id), follower)


@router.post("/{file_id}/validate")
def validate(request: Request, platform: PlatformDep, tenant: Writer, file_id: str) -> datasets_schemas.File:
    """Validate again what the platform failed on; a file that was validated is refused, for the same bytes give the same."""
    row = uploaded_files.validate_again(platform, tenant, file_id)
    request.app.state.validation.enqueue(file_id)
    return responses.file(row)


@router.delete("/{file_id}")
def delete(platform: PlatformDep, tenant: Writer, file_id: str) -> http_schemas.Deleted:
    """Delete the bytes; refused while a job that has not ended names the file."""
    uploaded_files.delete(platform, tenant, file_id)
    return http_schemas.Deleted(id=file_id, object="file")


@router.get("/{file_id}/content", response_class=StreamingResponse)
def content(platform: PlatformDep, tenant: Reader, file_id: str) -> StreamingResponse:
    """The bytes as uploaded."""
    row, stream = uploaded_files.content(platform, tenant, file_id)
    headers = {"content-length": str(row["bytes"]), "content-disposition": f'attachment; filename="{row["filename"]}"'}
    return StreamingResponse(_chunks(stream), media_type="application/octet-stream", headers=headers)


class _Changes:
    """What one listener has not heard of a file yet."""

    def __init__(self, platform: Platform, tenant: str, file_id: str) -> None:
        self._platform, self._tenant, self._file_id = platform, tenant, file_id
        self._said = ""

    def __call__(self, since: int) -> tuple[list[tuple[int, str]], bool]:
        row = uploaded_files.get(self._platform, self._tenant, self._file_id)
        said, over = responses.file_event(row).model_dump_json(), row["status"] != "uploaded"
        if said == self._said:
            return [], over
        self._said = said
        return [(since + 1, said)], over


def _chunks(stream: BinaryIO) -> Iterator[bytes]:
    with stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk
