"""``/v1/suites``: evaluation suites that a tenant's datasets are held against, the operator's and its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Path, Request
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile

from control_plane.datasets import responses, schemas, suites
from control_plane.http import forms, multipart_body
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import PlatformDep, Reader, Writer

router = APIRouter(prefix="/v1/suites", tags=["suites"])

FORM = {
    "type": "object",
    "required": ["file", "name", "field"],
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream", "description": "File with the rows of the suite."},
        "name": {"type": "string", "description": "Name of the suite, unique among your own."},
        "field": {"type": "string", "description": "Field of a row that holds the question; several are separated by commas, at most 8."},
        "column_map": {"type": "string", "description": 'Which field each source column becomes, as JSON such as {"query": "prompt"}.'},
    },
}


@router.post(
    "",
    summary="Add an evaluation suite",
    openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": FORM}}}},
)
async def add(request: Request, platform: PlatformDep, tenant: Writer) -> schemas.Suite:
    """Register an evaluation suite of your own. Files validated from now on are checked for its items."""
    async with request.form(max_files=1) as form:  # here, and not as a parameter: the key has been looked at before
        fields = {name: value for name, value in form.multi_items() if isinstance(value, str)}
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise multipart_body.missing("file")
        name, field = (_required(fields, wanted) for wanted in ("name", "field"))
        mapping = forms.column_map(fields.get("column_map"), fields)
        filename, stream = file.filename or "suite.jsonl", file.file
        made = await run_in_threadpool(
            lambda: suites.add(platform, tenant, stream, name=name, filename=filename, field=field, column_map=mapping)
        )
    return responses.suite(made)


def _required(fields: Mapping[str, str], name: str) -> str:
    if name not in fields:
        raise multipart_body.missing(name)
    return fields[name]


@router.get("", summary="List evaluation suites")
def list_suites(platform: PlatformDep, tenant: Reader) -> http_schemas.ListOf[schemas.Suite]:
    """List the suites that your files are checked against: those that ship with the platform, the operator's, and your own."""
    return http_schemas.ListOf(data=[responses.suite(r) for r in suites.list_suites(platform, tenant)])


@router.delete("/{name}", summary="Remove an evaluation suite")
def remove(platform: PlatformDep, tenant: Writer, name: Annotated[str, Path(description="Name of the suite.")]) -> http_schemas.Deleted:
    """Remove one of your evaluation suites. Those of the platform and the operator cannot be removed."""
    suites.remove(platform, tenant, name)
    return http_schemas.Deleted(id=name, object="eval_suite")
