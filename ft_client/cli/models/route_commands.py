"""``ft routes``: your own names for models, with weights between versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from core.errors import InvalidRequest
from ft_client.cli.output import percent, say
from ft_client.cli.record_views import add_group, listing
from ft_client.cli.remote import remote

if TYPE_CHECKING:
    from ft_client import FtClient, Record

Name = Annotated[str, typer.Argument(help="What requests put into `model`: a-z, 0-9, '_', '.' and '-'.")]
Targets = Annotated[list[str], typer.Argument(metavar="MODEL=WEIGHT", help="Adapters in production (id or model name) or a base model.")]
ROUTES = listing({"NAME": "name", "TARGETS": lambda r: ", ".join(f"{t['model']}={t['weight']}" for t in r["targets"])})
TARGETS = listing({
    "TARGET": "model", "WEIGHT": "weight", "SHARE": lambda t: percent(t["share"]),
    "STAGE": lambda t: t["stage"] or ("withdrawn" if t["adapter_id"] else "base"), "SERVED": lambda t: "yes" if t["served"] else "no",
})  # fmt: skip


def register(app: typer.Typer) -> None:
    about = "List your routes: names of your own for models, with weights between versions."
    add_group(app, "routes", {"list": list_routes, "set": set_route, "show": show, "delete": delete}, help=about, panel="Models")


def _show(route: Record) -> None:
    TARGETS(route["targets"])
    if any(not t["served"] for t in route["targets"]):
        say("a target that is not served gets no requests; the others get its share")


@remote(_show)
def set_route(client: FtClient, name: Name, targets: Targets) -> Any:
    """Point a name to targets; a single target needs no weight: `ft routes set bot adp-1=90 adp-2=10`."""
    parsed = dict(_target(t) for t in targets)
    if len(parsed) < len(targets):
        raise InvalidRequest("a target is named twice; give it one weight", code="invalid_route", param="targets")
    return client.model_routes.set(name, parsed)


@remote(ROUTES)
def list_routes(client: FtClient) -> Any:
    """List your routes: names of your own for models, with weights between versions."""
    return client.model_routes.list().all()


@remote(_show)
def show(client: FtClient, name: Name) -> Any:
    """Show a route with the current share of each target."""
    return client.model_routes.retrieve(name)


@remote("route {name} is deleted")
def delete(client: FtClient, name: Name) -> Any:
    """Delete a route; its targets stay available under their own names."""
    return client.model_routes.delete(name)


def _target(given: str) -> tuple[str, int]:
    model, sign, weight = given.rpartition("=")
    if not sign:
        return given, 1
    if not model or not weight.isdecimal():
        raise InvalidRequest(f"{given!r} is not MODEL=WEIGHT with a whole number", code="invalid_route", param="targets")
    return model, int(weight)
