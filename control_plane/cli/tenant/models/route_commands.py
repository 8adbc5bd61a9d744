"""``ft routes``: your own names for models, with weights between versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from control_plane.cli.output import Json, percent, print_json, say, table
from ft_assets.errors import InvalidRequest

if TYPE_CHECKING:
    from control_plane.client import Record

Name = Annotated[str, typer.Argument(help="What requests put into `model`: a-z, 0-9, '_', '.' and '-'.")]
Targets = Annotated[list[str], typer.Argument(metavar="MODEL=WEIGHT...", help="Adapters in production (id or model name) or a base model.")]


def register(app: typer.Typer) -> None:
    routes = typer.Typer(help="List your routes: names of your own for models, with weights between versions.", no_args_is_help=True)
    routes.command("list")(list_routes)
    for name, command in (("set", set_route), ("show", show), ("delete", delete)):
        routes.command(name)(command)
    app.add_typer(routes, name="routes", rich_help_panel="Models")


def set_route(name: Name, targets: Targets, as_json: Json = False) -> None:
    """Point a name to targets; a single target needs no weight: `ft routes set bot adp-1=90 adp-2=10`."""
    from control_plane.cli.tenant.remote import connect

    parsed = dict(_target(t) for t in targets)
    if len(parsed) < len(targets):
        raise InvalidRequest("a target is named twice; give it one weight", code="invalid_route", param="targets")
    with connect() as client:
        _show(client.model_routes.set(name, parsed), as_json=as_json)


def list_routes(as_json: Json = False) -> None:
    """List your routes: names of your own for models, with weights between versions."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        found = client.model_routes.list().all()
    if as_json:
        print_json(found)
        return
    rows = [(r["name"], ", ".join(f"{t['model']}={t['weight']}" for t in r["targets"])) for r in found]
    table(("NAME", "TARGETS"), rows)


def show(name: Name, as_json: Json = False) -> None:
    """Show a route with the present share of each target."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        _show(client.model_routes.retrieve(name), as_json=as_json)


def delete(name: Name, as_json: Json = False) -> None:
    """Delete a route; its targets stay available under their own names."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        done = client.model_routes.delete(name)
    if as_json:
        print_json(done)
        return
    say(f"route {name} is deleted")


def _target(given: str) -> tuple[str, int]:
    model, sign, weight = given.rpartition("=")
    if not sign:
        return given, 1
    if not model or not weight.isdecimal():
        raise InvalidRequest(f"{given!r} is not MODEL=WEIGHT with a whole number", code="invalid_route", param="targets")
    return model, int(weight)


def _show(route: Record, *, as_json: bool) -> None:
    if as_json:
        print_json(route)
        return
    reported = ((t, t["stage"] or ("withdrawn" if t["adapter_id"] else "base"), "yes" if t["served"] else "no") for t in route["targets"])
    rows = [(t["model"], str(t["weight"]), percent(t["share"]), stage, served) for t, stage, served in reported]
    table(("TARGET", "WEIGHT", "SHARE", "STAGE", "SERVED"), rows)
    if any(not t["served"] for t in route["targets"]):
        say("a target that is not served gets no requests; the others get its share")
