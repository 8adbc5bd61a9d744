"""Contamination lists: whose items files are checked for and where they were found, a form that adds one; scored suites, general tasks."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, Response

from control_plane.console.pages.page import PageDep, PageRoute, see
from control_plane.datasets import suites
from control_plane.datasets.scored_suites import service as scored_suites
from control_plane.evaluations.routes import list_capability_suites
from control_plane.http.authentication import Writer

SUITES = "/console/datasets/suites"
router = APIRouter(prefix=SUITES, route_class=PageRoute, include_in_schema=False)


@router.get("")
def list_suites(page: PageDep) -> HTMLResponse:
    """List them with the dataset versions in which their items were found; its script adds lists through the API."""
    found = suites.list_suites(page.platform, page.tenant)
    uses = suites.uses(page.platform, page.tenant)
    return page.show(
        "suites.html",
        suites=[(suite, uses.get(suites.label(suite))) for suite in found],
        num_versions=suites.VERSIONS_READ,
        max_file_bytes=suites.MAX_FILE_BYTES,
        max_items=suites.MAX_ITEMS,
        max_suites=suites.MAX_SUITES,
        scored=scored_suites.newest(page.platform, page.tenant),
        general=list_capability_suites(page.platform, page.tenant).data,
    )


@router.post("/scored/{name}/remove")
def remove_scored_suite(page: PageDep, tenant: Writer, name: str) -> Response:
    """Remove a scored suite of the tenant with all of its versions."""
    scored_suites.remove(page.platform, tenant, name)
    return see(SUITES, "deleted")


@router.post("/{name}/remove")
def remove_suite(page: PageDep, tenant: Writer, name: str) -> Response:
    """Remove a contamination list of the tenant."""
    suites.remove(page.platform, tenant, name)
    return see(SUITES, "deleted")
