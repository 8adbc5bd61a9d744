"""Datasets: the list with recent uploads, the upload page, and reports of versions and of refused files."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse, Response

from control_plane.console.documents.report_page import report_values
from control_plane.console.pages.page import PageDep, PageRoute, see
from control_plane.datasets import previews, responses
from control_plane.datasets import service as datasets
from control_plane.datasets.uploads import uploaded_files
from control_plane.http.authentication import Approver
from control_plane.jobs import service as jobs
from control_plane.jobs.job_filters import JobFilter
from control_plane.models import service as models
from engine.data import ENCODING_LABELS, parse_column_map, preview_pieces

DATASETS = "/console/datasets"
RECENT_FILES = 10
"""Newest files looked at for those that are not datasets, or not yet."""
PREVIEWED = 3
USES_SHOWN = 10
"""Newest jobs listed that train on a version."""
STAGES = (
    ("starting", "Fetch the file from the store"),
    ("reading", "Read and check every row"),
    ("duplicates", "Compare rows with each other"),
    ("writing", "Store the rows"),
)
"""Stages of a validation, in order."""
OPTIONS = {"--map": "map", "--rows-at": "rows_at", "--encoding": "encoding"}
"""Options of a command that read a file otherwise, with their names in the upload page's address."""
router = APIRouter(prefix="/console", route_class=PageRoute, include_in_schema=False)


@router.get("/datasets")
def list_datasets(page: PageDep, after: Annotated[str | None, Query()] = None) -> HTMLResponse:
    """List dataset versions, newest first, and on the first page recent files that are refused or being validated."""
    found = datasets.list_datasets(page.platform, page.tenant, after=after)
    newest = () if after else uploaded_files.list_files(page.platform, page.tenant, limit=RECENT_FILES, purpose="fine-tune").items
    return page.show(
        "datasets.html",
        datasets=[responses.dataset(one) for one in found.items],
        files=[responses.file(one) for one in newest if one.status != "processed"],
        has_more=found.has_more,
        after=after,
    )


@router.get("/datasets/new")
def upload(
    page: PageDep,
    column_map: Annotated[str | None, Query(alias="map", max_length=4000)] = None,
    rows_at: Annotated[str | None, Query(max_length=1000)] = None,
    encoding: Annotated[str | None, Query(max_length=40)] = None,
) -> HTMLResponse:
    """Show the page that uploads files; its script sends them through the API, read as the address says (see :func:`correction`)."""
    bases = models.list_models(page.platform, page.tenant, type="base_model")
    newest = uploaded_files.list_files(page.platform, page.tenant, limit=RECENT_FILES, purpose="fine-tune").items
    validating = [{"id": f.id, "filename": f.filename, "bytes": f.bytes, "status": f.status} for f in newest if f.status == "uploaded"]
    offered = [one for one in bases if one.deprecated_since is None]
    return page.show(
        "dataset_upload.html",
        bases=offered,
        encodings=ENCODING_LABELS.items(),
        validating=validating,
        column_map=parse_column_map(column_map) if column_map else {},
        rows_at=rows_at,
        encoding=encoding,
    )


@router.get("/datasets/{dataset_id}")
def dataset_page(page: PageDep, dataset_id: str, model: Annotated[str | None, Query()] = None) -> HTMLResponse:
    """Show a version with its report; with `model`, also the first rows as that model is trained on them."""
    found = datasets.get(page.platform, page.tenant, dataset_id)
    report = datasets.report(page.platform, page.tenant, dataset_id)
    shown = (
        previews.preview_dataset(page.platform, page.tenant, dataset_id, model=model, num_examples=PREVIEWED, max_seq_len=None)
        if model
        else ()
    )
    bases = [one for one in models.list_models(page.platform, page.tenant, type="base_model") if one.deprecated_since is None]
    uses = jobs.list_jobs(page.platform, page.tenant, limit=USES_SHOWN, narrowed=JobFilter(dataset=dataset_id))
    return page.show(
        "dataset.html",
        dataset=responses.dataset(found),
        examples=[(one, preview_pieces(one)) for one in shown],
        model=model,
        bases=bases,
        versions=datasets.versions(page.platform, page.tenant, found.name),
        uses=uses.items,
        has_more_uses=uses.has_more,
        is_alone=False,
        **report_values(report),
    )


@router.post("/datasets/{dataset_id}/approve")
def approve(page: PageDep, principal: Approver, dataset_id: str) -> Response:
    """Let jobs train on a version that waits for review."""
    datasets.approve(page.platform, principal.tenant.id, dataset_id, by=principal.id)
    return see(f"{DATASETS}/{dataset_id}", "approved")


@router.get("/files/{file_id}")
def file_page(page: PageDep, file_id: str) -> Response:
    """Show the report of a file that was refused, or how far its validation is; a valid one has the page of its dataset."""
    file = uploaded_files.get(page.platform, page.tenant, file_id)
    if file.dataset_id is not None:
        return see(f"{DATASETS}/{file.dataset_id}")
    shown = responses.file(file)
    if file.report is None:
        return page.show("file_pending.html", file=shown, stages=STAGES)
    values = report_values(datasets.report(page.platform, page.tenant, file_id))
    return page.show("file.html", file=shown, is_alone=False, corrected=correction(values["problems"]), **values)


def correction(problems: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the address of the upload page that reads a file as a problem's command does; None if no problem names such a command."""
    for words in (shlex.split(problem.get("command") or "") for problem in problems):
        if given := {OPTIONS[word]: words[at + 1] for at, word in enumerate(words[:-1]) if word in OPTIONS}:
            return f"{DATASETS}/new?{urlencode(given)}"
    return None
