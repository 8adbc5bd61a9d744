"""``ft suites``: evaluation suites that datasets are checked against, and those that jobs are evaluated with.

``ft admin suites`` does the same for the operator's suites of the first kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.cli.output import Json, ago, print_json, say, table
from control_plane.cli.tenant.data.dataset_commands import Map, parse_map

if TYPE_CHECKING:
    from control_plane.client import Record

Name = Annotated[str, typer.Argument(help="Name of the suite: letters, digits, '_' and '-'.")]
File = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSONL, JSON, CSV or Parquet; a row is an item.")]
Field = Annotated[str, typer.Option("--field", help="Field that holds the question; several with commas between.")]


def register(app: typer.Typer) -> None:
    suites = typer.Typer(help="Evaluation suites that your datasets are checked against.", no_args_is_help=True)
    for name, command in (("add", add), ("list", list_suites), ("remove", remove), ("capability", list_capability)):
        suites.command(name)(command)
    app.add_typer(suites, name="suites", rich_help_panel="Data")


def add(name: Name, file: File, field: Field = "question", column_map: Map = None, as_json: Json = False) -> None:
    """Register a suite of your own; uploads from now on are checked for its items."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        made = client.suites.create(file, name=name, field=field, column_map=parse_map(column_map))
    show_suite(made, as_json=as_json)


def list_suites(as_json: Json = False) -> None:
    """List the built-in suites, the operator's and yours."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        listed(client.suites.list().all(), as_json=as_json)


def remove(name: Name, as_json: Json = False) -> None:
    """Remove one of your suites."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        done = client.suites.delete(name)
    if as_json:
        print_json(done)
        return
    say(f"suite {name} is removed")


def list_capability(as_json: Json = False) -> None:
    """List general tasks that jobs can be evaluated with (eval_config.capability), and which are ready."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        found = client.capability_suites.list().all()
    if as_json:
        print_json(found)
        return
    rows = [
        (s["name"] + (" (default)" if s["default"] else ""), s["version"] or "", _or_unknown(s["num_fewshot"]), _or_unknown(s["num_items"]),
         "yes" if s["ready"] else f"no: {s['reason']}")
        for s in found
    ]  # fmt: skip
    table(("NAME", "VERSION", "SHOTS", "ITEMS", "READY"), rows)


def _or_unknown(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def show_suite(suite: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(dict(suite))
        return
    say(f"suite {suite['name']}: {suite['num_items']} items; new uploads are checked for them")


def listed(found: Sequence[Mapping[str, Any] | Record], *, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    rows = [(s["name"], s["owner"], f"{s['num_items']:,}", s["field"], ago(s["created_at"])) for s in found]
    table(("NAME", "OWNER", "ITEMS", "FIELD", "CREATED"), rows)
