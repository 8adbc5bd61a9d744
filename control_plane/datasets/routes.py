"""``/v1/datasets`` and ``/v1/suites``: versions, reports, approval, previews, imports from the Hub, and contamination lists."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, Response
from starlette.concurrency import run_in_threadpool

from control_plane.console.documents.report_page import report_page
from control_plane.datasets import hub, previews, responses, schemas, suites
from control_plane.datasets import service as datasets
from control_plane.datasets.tables import Suite
from control_plane.http import forms, parameters
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import Approver, PlatformDep, Reader, Writer
from control_plane.platform.pagination import Page
from core.storable_text import check_storable

datasets_router = APIRouter(prefix="/v1/datasets", tags=["datasets"])


@datasets_router.get("", summary="List datasets")
def list_datasets(
    platform: PlatformDep, tenant: Reader, after: parameters.After = None, limit: parameters.Limit = 20
) -> http_schemas.ListOf[schemas.Dataset]:
    """List your dataset versions, newest first."""
    found = datasets.list_datasets(platform, tenant, after=after, limit=limit)
    return http_schemas.ListOf(data=[responses.dataset(r) for r in found.items], has_more=found.has_more)


@datasets_router.post("/import", summary="Import a dataset from the Hub")
def import_dataset(platform: PlatformDep, tenant: Writer, body: schemas.ImportDataset) -> schemas.File:
    """Create a file from a Hugging Face dataset at a pinned revision. It is fetched after this returns, then validated like an upload."""
    check_storable(body.model_dump())
    policies = forms.with_reading(body.policies, encoding=body.encoding, rows_at=body.rows_at)
    row = hub.import_dataset(
        platform,
        tenant,
        hub_id=body.hub_id,
        column_map=body.column_map,
        policies=policies,
        model=body.model,
        hub_token=body.hub_token or "",
    )
    return responses.file(row)


@datasets_router.get("/{dataset_id}", summary="Retrieve a dataset")
def retrieve(platform: PlatformDep, tenant: Reader, dataset_id: parameters.DatasetId) -> schemas.Dataset:
    """Return a dataset version."""
    return responses.dataset(datasets.get(platform, tenant, dataset_id))


@datasets_router.post("/{dataset_id}/approve", summary="Approve a dataset")
def approve(platform: PlatformDep, principal: Approver, dataset_id: parameters.DatasetId) -> schemas.Dataset:
    """Approve a dataset version that its policies hold for review, so that jobs may train on it. Approving again changes nothing."""
    return responses.dataset(datasets.approve(platform, principal.tenant.id, dataset_id, by=principal.id))


@datasets_router.get("/{dataset_id}/preview", summary="Preview a dataset")
def preview(
    platform: PlatformDep,
    tenant: Reader,
    dataset_id: parameters.DatasetId,
    model: Annotated[str, Query(description="Base model whose chat template and tokenizer are used.")],
    num_examples: Annotated[int, Query(description="Examples to return, 1 to 100.")] = 5,
    max_seq_len: Annotated[
        int | None, Query(description="Sequence length in tokens to truncate at. Default: the context length of the model.")
    ] = None,
) -> http_schemas.ObjectList:
    """Return the first examples exactly as a job would train on them: rendered text, tokens, spans with loss or reasoning, truncation."""
    shown = previews.preview_dataset(platform, tenant, dataset_id, model=model, num_examples=num_examples, max_seq_len=max_seq_len)
    return http_schemas.ObjectList(data=[asdict(one) for one in shown])


@datasets_router.get(
    "/{dataset_id}/report",
    summary="Retrieve a validation report",
    response_model=http_schemas.JsonObject,
    responses={200: {"content": {"text/html": {}}}},
)
def report(
    platform: PlatformDep,
    tenant: Reader,
    dataset_id: Annotated[str, Path(description="Id of the dataset version (`ds_...`) or of the file (`file-...`).")],
    accept: parameters.Accept = "application/json",
) -> Response:
    """Return the validation report of a dataset version or a file, even if it failed validation; as an HTML page if `Accept` asks for
    it."""
    found = datasets.report(platform, tenant, dataset_id)
    if "text/html" in accept:
        return HTMLResponse(
            report_page(found, name=dataset_id), headers={"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
        )
    return JSONResponse(dict(found))


suites_router = APIRouter(prefix="/v1/suites", tags=["suites"])

FORM = {
    "type": "object",
    "required": ["file", "name", "field"],
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream", "description": "File with the rows of the list."},
        "name": {"type": "string", "description": "Name of the list, unique among your own."},
        "field": {"type": "string", "description": "Field of a row that holds the question; several are separated by commas, at most 8."},
        "column_map": {"type": "string", "description": 'Which field each source column becomes, as JSON such as {"query": "prompt"}.'},
    },
}


@suites_router.post(
    "",
    summary="Add a contamination list",
    response_model=schemas.Suite,
    openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": FORM}}}},
)
async def add(request: Request, platform: PlatformDep, tenant: Writer) -> Suite:
    """Register a contamination list. Files validated from now on are checked for its items."""
    async with forms.with_file(request, ("name", "field", "column_map[]"), required=("name", "field")) as (fields, file):
        name, field = fields["name"], fields["field"]
        mapping = forms.column_map(fields.get("column_map"), fields)
        filename, stream = file.filename or "suite.jsonl", file.file
        return await run_in_threadpool(
            lambda: suites.add(platform, tenant, stream, name=name, filename=filename, field=field, column_map=mapping)
        )


@suites_router.get("", summary="List contamination lists", response_model=http_schemas.ListOf[schemas.Suite])
def list_suites(platform: PlatformDep, tenant: Reader) -> Page[Suite]:
    """List the contamination lists that your files are checked against: those that ship with the platform, the operator's, and your own."""
    return Page(items=suites.list_suites(platform, tenant), has_more=False)


@suites_router.get("/index", summary="Download the index of contamination lists", response_class=FileResponse)
def index(platform: PlatformDep, tenant: Reader) -> FileResponse:
    """Download the hashes that your files are compared with, as a ZIP archive, to check a file before you upload it.

    `ft check` does so. The hashes are of 13 words each and contain no text. The first call after a list was added or removed builds them;
    until it returns, others are refused with 503 (`index_being_built`).
    """
    return FileResponse(suites.index_archive(platform, tenant), media_type="application/zip")


@suites_router.delete("/{name}", summary="Remove a contamination list")
def remove(platform: PlatformDep, tenant: Writer, name: Annotated[str, Path(description="Name of the list.")]) -> http_schemas.Deleted:
    """Remove one of your contamination lists. Those of the platform and the operator cannot be removed."""
    suites.remove(platform, tenant, name)
    return http_schemas.Deleted(id=name, object="eval_suite")
