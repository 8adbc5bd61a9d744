"""``/v1/files``: upload, get, validate, download, delete."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Annotated, Any, Literal
from urllib.parse import quote

import anyio
from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from control_plane.datasets import responses
from control_plane.datasets import schemas as datasets_schemas
from control_plane.datasets.schemas import ENCODING_HELP
from control_plane.datasets.uploads import uploaded_files
from control_plane.http import forms, parameters
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import FollowerDep, PlatformDep, Reader, Writer
from control_plane.http.streams import server_sent
from control_plane.http.turns import Download, give_up_turn, run_waiting
from control_plane.platform.context import Platform
from control_plane.platform.transfer import in_pieces
from core.layout import safe_filename

router = APIRouter(prefix="/v1/files", tags=["files"])


FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "purpose": {"type": "string", "enum": ["fine-tune"], "description": "What the file is for."},
        "file": {"type": "string", "contentMediaType": "application/octet-stream", "description": "Content of the file."},
        "column_map": {"type": "string", "description": 'Which field each column becomes, such as {"question": "prompt"}.'},
        "policies": {"type": "string", "description": 'Validation policies as JSON such as {"pii": "redact"}; see docs/datasets.md.'},
        "encoding": {"type": "string", "description": ENCODING_HELP},
        "rows_at": {"type": "string", "description": "For a file that is one JSON object, the key that holds the rows."},
        "model": {"type": "string", "description": "Base model that provides the tokenizer and the control tokens to search for."},
        "expires_after[anchor]": {
            "type": "string", "enum": [forms.ANCHOR],
            "description": "What the time counts from: the creation of the file. `expires_after` may also be one field, as JSON.",
        },
        "expires_after[seconds]": {
            "type": "integer", "minimum": forms.MIN_EXPIRY_S, "maximum": forms.MAX_EXPIRY_S,
            "description": "Seconds after the anchor at which the file expires. If absent, it is kept until deleted.",
        },
    },
}  # fmt: skip
FIELDS = ("purpose", "model", "column_map[]", "policies[]", "expires_after[]", "encoding", "rows_at")
"""Fields beside the file; of those with brackets, keys may be fields of their own."""


@router.post(
    "", summary="Upload a file", openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": FORM}}}}
)
async def upload(request: Request, platform: PlatformDep, tenant: Writer) -> datasets_schemas.File:
    """Upload a dataset as a file and validate it. Files below 32 MiB (compressed: 2 MiB) are usually validated before this returns.

    The response waits up to 45 seconds for the validation. If `status` is still `uploaded` by then, follow `GET /v1/files/{file_id}/events`
    until it is `processed` or `error`. Send the other fields before the file, so that they are checked before it is read. Nested fields may
    be sent as `policies[pii]=redact`, as the OpenAI client does with `extra_body`. Unknown fields are refused. For files over 64 MiB use
    `/v1/uploads`, which can be resumed after a broken connection.
    """
    form = forms.Form(request, file_field="file", known=FIELDS)
    await form.to_file()
    if form.fields.get("purpose"):
        await run_in_threadpool(uploaded_files.check_request, platform, **_checked(_request_of(form.fields)))
    name = form.filename or "upload.jsonl"
    stored = await form.store(lambda stream: uploaded_files.store(platform, tenant, stream, filename=name), tenant=tenant)
    try:
        await form.rest()
        request_fields = _request_of(form.fields)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await run_in_threadpool(uploaded_files.discard, platform, tenant, stored)
        raise
    row = await run_in_threadpool(lambda: uploaded_files.register(platform, tenant, stored, **request_fields))
    await give_up_turn(request)
    return responses.file(await run_in_threadpool(uploaded_files.wait_for_upload, platform, row))


def _request_of(fields: Mapping[str, str]) -> Mapping[str, Any]:
    """Read the form's fields for the service."""
    if not fields.get("purpose"):
        raise forms.missing("purpose")
    seconds = forms.expires_after(fields.get("expires_after"), fields)
    return {
        "purpose": fields["purpose"],
        "column_map": forms.column_map(fields.get("column_map"), fields),
        "policies": forms.policies(fields.get("policies"), fields),
        "model": fields.get("model") or None,
        "expires_after": None if seconds is None else timedelta(seconds=seconds),
    }


def _checked(request_fields: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: request_fields[name] for name in ("purpose", "policies", "model")}


@router.get("", summary="List files")
def list_files(
    platform: PlatformDep,
    tenant: Reader,
    after: parameters.After = None,
    limit: Annotated[int, parameters.limit(10_000)] = 10_000,
    order: Annotated[Literal["asc", "desc"], Query(description="Order by creation time: `desc` lists the newest file first.")] = "desc",
    purpose: Annotated[str | None, Query(description="Return only files with this purpose: `fine-tune` or `fine-tune-results`.")] = None,
    sha256: Annotated[str | None, Query(description="Return only files with these bytes, by their SHA-256 in hexadecimal.")] = None,
) -> http_schemas.ListOf[datasets_schemas.File]:
    """List your files, newest first unless `order` is `asc`."""
    found = uploaded_files.list_files(platform, tenant, after=after, limit=limit, order=order, purpose=purpose, sha256=sha256)
    return http_schemas.ListOf(data=[responses.file(r) for r in found.items], has_more=found.has_more)


@router.get("/{file_id}", summary="Retrieve a file")
def retrieve(platform: PlatformDep, tenant: Reader, file_id: parameters.FileId) -> datasets_schemas.File:
    """Return a file with the state of its validation."""
    return responses.file(uploaded_files.get(platform, tenant, file_id))


@router.get("/{file_id}/events", summary="Stream the validation of a file", response_class=StreamingResponse)
def events(platform: PlatformDep, tenant: Reader, follower: FollowerDep, file_id: parameters.FileId) -> StreamingResponse:
    """Stream the validation of a file as server-sent events, at most one per second, until it ends. The last message is `[DONE]`."""
    uploaded_files.get(platform, tenant, file_id)  # fail before the stream starts, not with an empty stream
    return server_sent(_Changes(platform, tenant, file_id), follower)


@router.post("/{file_id}/validate", summary="Validate a file again")
def validate(platform: PlatformDep, tenant: Writer, file_id: parameters.FileId) -> datasets_schemas.File:
    """Validate a file again after a failure of the platform. A file that was already validated is refused, because the result would be
    the same."""
    return responses.file(uploaded_files.validate_again(platform, tenant, file_id))


@router.delete("/{file_id}", summary="Delete a file")
def delete(platform: PlatformDep, tenant: Writer, file_id: parameters.FileId) -> http_schemas.Deleted:
    """Delete a file. Refused while an unfinished job uses it. The dataset version made from it is kept."""
    uploaded_files.delete(platform, tenant, file_id)
    return http_schemas.Deleted(id=file_id, object="file")


@router.get("/{file_id}/content", summary="Download a file", response_class=StreamingResponse)
async def content(request: Request, platform: PlatformDep, tenant: Reader, file_id: parameters.FileId) -> Download:
    """Download the content of a file as it was uploaded."""
    row, stream = await run_waiting(request, partial(uploaded_files.content, platform, tenant, file_id))
    headers = {"content-length": str(row.bytes), "content-disposition": _attachment(row.filename)}
    return Download(in_pieces(stream), media_type="application/octet-stream", headers=headers)


def _attachment(filename: str) -> str:
    """Return the header that names a download: in ASCII, and as it is (RFC 6266)."""
    named = f'attachment; filename="{safe_filename(filename)}"'
    return named if filename.isascii() else f"{named}; filename*=UTF-8''{quote(filename, safe='')}"


class _Changes:
    """What one listener has not seen of a file yet."""

    def __init__(self, platform: Platform, tenant: str, file_id: str) -> None:
        self._platform, self._tenant, self._file_id = platform, tenant, file_id
        self._last_event = ""

    def __call__(self, since: int) -> tuple[list[tuple[int, str]], bool]:
        row = uploaded_files.get(self._platform, self._tenant, self._file_id)
        event, over = responses.file_event(row).model_dump_json(), row.status != "uploaded"
        if event == self._last_event:
            return [], over
        self._last_event = event
        return [(since + 1, event)], over
