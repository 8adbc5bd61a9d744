"""``ft contamination``: lists of items that datasets are checked against; ``ft suites``: what jobs are evaluated with.

The commands of ``ft contamination`` are also those of ``ft suites``, where they were first. ``ft admin`` has both for operators.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ft_client.cli.data_commands import Map, parse_map
from ft_client.cli.record_views import add_group, count, listing, since
from ft_client.cli.remote import remote

if TYPE_CHECKING:
    from ft_client import FtClient

Name = Annotated[str, typer.Argument(help="Name of the list: letters, digits, '_' and '-'.")]
File = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSONL, JSON, CSV or Parquet; a row is an item.")]
Field = Annotated[str, typer.Option("--field", help="Field that holds the question; several with commas between.")]
SUITES = listing({"NAME": "name", "OWNER": "owner", "ITEMS": count("num_items"), "FIELD": "field", "CREATED": since("created_at")})
CAPABILITIES = listing({
    "NAME": lambda s: s["name"] + (" (default)" if s["default"] else ""), "VERSION": "version", "SHOTS": count("num_fewshot", "?"),
    "ITEMS": count("num_items", "?"), "READY": lambda s: "yes" if s["ready"] else f"no: {s['reason']}",
})  # fmt: skip
ADDED = "contamination list {name}: {num_items} items; new uploads are checked for them"
REMOVED = "contamination list {name} is removed"


def register(app: typer.Typer) -> None:
    commands = {"add": add, "list": list_suites, "remove": remove}
    add_group(app, "contamination", commands, help="Contamination lists that your datasets are checked against.", panel="Data")
    suites = {"capability": list_capability, **commands}
    add_group(
        app, "suites", suites, help="General tasks that jobs are evaluated with; also the commands of `ft contamination`.", panel="Data"
    )


@remote(ADDED)
def add(client: FtClient, name: Name, file: File, field: Field = "question", column_map: Map = None) -> Any:
    """Register a contamination list of your own; uploads from now on are checked for its items."""
    return client.suites.create(file, name=name, field=field, column_map=parse_map(column_map))


@remote(SUITES)
def list_suites(client: FtClient) -> Any:
    """List the contamination lists that ship, the operator's and yours."""
    return client.suites.list().all()


@remote(REMOVED)
def remove(client: FtClient, name: Name) -> Any:
    """Remove one of your contamination lists."""
    return client.suites.delete(name)


@remote(CAPABILITIES)
def list_capability(client: FtClient) -> Any:
    """List general tasks that jobs can be evaluated with (eval_config.capability), and which are ready."""
    return client.capability_suites.list().all()
