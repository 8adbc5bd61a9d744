"""``/v1/datasets``: versions, their reports, approval, previews, and imports from the Hub."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Header, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from control_plane.console.report_page import report_page
from control_plane.datasets import hub, previews, responses, schemas
from control_plane.datasets import service as datasets
from control_plane.http import forms
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import Approver, PlatformDep, Reader, Writer

router = APIRouter(prefix="/v1/datasets", tags=["datasets"])


@router.get("")
def list_datasets(platform: PlatformDep, tenant: Reader, after: str | None = None, limit: int = 20) -> http_schemas.ListOf[schemas.Dataset]:
    """Dataset versions, newest first."""
    found = datasets.list_datasets(platform, tenant, after=after, limit=limit)
    return http_schemas.ListOf(data=[responses.dataset(r) for r in found.items], has_more=found.has_more)


@router.post("/import")
def import_dataset(request: Request, platform: PlatformDep, tenant: Writer, body: schemas.ImportDataset) -> schemas.File:
    """Make a file from a dataset of the Hub, at a pinned revision: fetched after this answers, then validated as an upload is."""
    token = body.hub_token or ""
    policies = forms.with_reading(body.policies, encoding=body.encoding, rows_at=body.rows_at)
    row = hub.import_dataset(
        platform, tenant, hub_id=body.hub_id, column_map=body.column_map, policies=policies, model=body.model, hub_token=token
    )
    request.app.state.validation.enqueue(row["id"], hub_token=token)
    return responses.file(row)


@router.get("/{dataset_id}")
def retrieve(platform: PlatformDep, tenant: Reader, dataset_id: str) -> schemas.Dataset:
    """One dataset version."""
    return responses.dataset(datasets.get(platform, tenant, dataset_id))


@router.post("/{dataset_id}/approve")
def approve(platform: PlatformDep, principal: Approver, dataset_id: str) -> schemas.Dataset:
    """Let jobs train on a dataset that its policies hold back for review; approving again changes nothing."""
    return responses.dataset(datasets.approve(platform, principal.tenant.id, dataset_id, key_id=principal.key_id))


@router.get("/{dataset_id}/preview")
def preview(
    platform: PlatformDep, tenant: Reader, dataset_id: str, model: str, num_examples: int = 5, max_seq_len: int | None = None
) -> http_schemas.ListOf[dict[str, Any]]:
    """The first examples exactly as they are trained: rendered text, token ids, which spans carry loss, what is cut."""
    shown = previews.preview_dataset(platform, tenant, dataset_id, model=model, num_examples=num_examples, max_seq_len=max_seq_len)
    return http_schemas.ListOf(data=shown)


@router.get("/{dataset_id}/report", response_model=dict[str, Any], responses={200: {"content": {"text/html": {}}}})
def report(platform: PlatformDep, tenant: Reader, dataset_id: str, accept: str = Header("application/json")) -> Response:
    """The report of a dataset version, or of a file by its id: a refused file has a report, too. As a page for `Accept: text/html`."""
    found = datasets.report(platform, tenant, dataset_id)
    if "text/html" in accept:
        return HTMLResponse(
            report_page(found, name=dataset_id), headers={"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
        )
    return JSONResponse(dict(found))
