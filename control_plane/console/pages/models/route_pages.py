"""Model routes, which split callers among models; and the pages of base models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Form
from fastapi.responses import HTMLResponse, Response

from control_plane.console.pages.page import Page, PageDep, PageRoute, see
from control_plane.http.authentication import Writer
from control_plane.models import service as models
from control_plane.serving import model_routes
from control_plane.serving.model_routes import Route
from core.errors import InvalidRequest, NotFound

ROUTES = "/console/models/routes"
SPARE_ROWS = 2
"""Empty rows of the form, for further targets without JavaScript."""
MAX_DIGITS = 9
"""Of a weight."""
router = APIRouter(prefix="/console/models", route_class=PageRoute, include_in_schema=False)
Values = Annotated[list[str] | None, Form()]


@router.get("/routes")
def list_routes(page: PageDep) -> HTMLResponse:
    """List the tenant's routes with the shares of their targets, and the form of a new one."""
    return page.show("routes.html", routes=model_routes.list_routes(page.platform, page.tenant), **_form(page))


@router.post("/routes")
def put_route(page: PageDep, tenant: Writer, name: Annotated[str, Form()] = "", model: Values = None, weight: Values = None) -> Response:
    """Create a route, or set the targets of one; rows without a model are ignored."""
    rows = zip(model or (), weight or (), strict=False)
    targets = [(chosen, _weight(given, chosen)) for chosen, given in rows if chosen]
    made = model_routes.put(page.platform, tenant, name.strip(), targets)
    return see(f"{ROUTES}/{made.name}", "route-set")


@router.get("/routes/{name}")
def route_page(page: PageDep, name: str) -> HTMLResponse:
    """Show a route: the shares of its targets, how to change them, and what deleting it would do."""
    route = model_routes.get(page.platform, page.tenant, name)
    return page.show("route.html", route=route, **_form(page, route))


@router.post("/routes/{name}/delete")
def delete_route(page: PageDep, tenant: Writer, name: str) -> Response:
    """Delete a route; requests to its name fail from then on."""
    model_routes.delete(page.platform, tenant, name)
    return see(ROUTES, "deleted")


def _form(page: Page, route: Route | None = None) -> dict[str, Sequence[object]]:
    """Return what the form offers: models that can be targets, and the rows that it begins with."""
    offered = [one for one in models.list_models(page.platform, page.tenant) if one.type == models.BASE or one.stage == "production"]
    given = [(one.model, one.weight) for one in route.targets] if route else []
    known = {one.id for one in offered}
    return {
        "offered": offered,
        "withdrawn": [name for name, _ in given if name not in known],
        "rows": [*given, *[("", "")] * SPARE_ROWS],
    }


def _weight(given: str, model: str) -> int:
    if not given.strip().isdecimal() or len(given.strip()) > MAX_DIGITS:
        raise InvalidRequest(f"weight {given[:20]!r} of {model[:120]} is not a whole number; give one from 0 on", param="weight")
    return int(given)


@router.get("/base/{model:path}")
def base_model(page: PageDep, model: str) -> HTMLResponse:
    """Show a base model and the tenant's models that were trained on it."""
    found = models.get(page.platform, page.tenant, model)
    if found.type != models.BASE:
        raise NotFound(f"{model[:120]!r} is not a base model", code="model_not_found", param="model")
    trained = [one for one in models.list_models(page.platform, page.tenant, base_model=found.id) if one.adapter_id is not None]
    return page.show("base_model.html", model=found, trained=trained)
