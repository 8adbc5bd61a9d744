"""The form of a new job, and the playground: their scripts call the API with the page's session."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse

from control_plane.console.pages.page import PageDep, PageRoute
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs.estimates import model_limits
from control_plane.models import service as models

FILES_OFFERED = 100
"""Newest files in the choice of data; others can be named in the address."""
BASIC = ("n_epochs", "learning_rate", "rank", "batch_size", "max_seq_len")
"""Hyperparameters with a field of their own; the others are below "more"."""
router = APIRouter(prefix="/console", route_class=PageRoute, include_in_schema=False)
Chosen = Annotated[str | None, Query()]


@router.get("/jobs/new")
def new_job(page: PageDep, model: Chosen = None, file: Chosen = None) -> HTMLResponse:
    """Show the form; the address may choose the base model and the file."""
    limits = [one for one in model_limits.model_limits(page.platform) if one.accepts_jobs]
    found = uploaded_files.list_files(page.platform, page.tenant, limit=FILES_OFFERED, purpose="fine-tune").items
    common = limits[0].hyperparameters if limits else {}
    return page.show(
        "new_job.html",
        limits=limits,
        files=[one for one in found if one.status == "processed"],
        basic={name: common[name] for name in BASIC if name in common},
        more={name: limit for name, limit in common.items() if name not in BASIC},
        model=model,
        file=file,
    )


@router.get("/playground")
def playground(page: PageDep) -> HTMLResponse:
    """Show one prompt and the answers of two models beside each other."""
    offered = [one for one in models.list_models(page.platform, page.tenant) if one.stage in (None, "production")]
    return page.show("playground.html", models=offered)
