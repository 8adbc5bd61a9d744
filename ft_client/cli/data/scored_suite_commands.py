"""``ft scored-suites``: suites of prompts with references that jobs are evaluated with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from core.errors import InvalidRequest
from ft_client.cli.record_views import add_group, count, listing, since
from ft_client.cli.remote import remote

if TYPE_CHECKING:
    from ft_client import FtClient

Name = Annotated[str, typer.Argument(help="Name of the suite: letters, digits, '_' and '-'.")]
File = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSONL, JSON, CSV or Parquet; a row is an item with its answer.")]
Grader = Annotated[
    Path | None, typer.Option("--grader", exists=True, dir_okay=False, help="JSON file with a grader, in place of a metric.")
]
SUITES = listing({
    "NAME": "name", "VERSION": count("version"), "ITEMS": count("num_items"), "SCORED BY": "metric",
    "AT LEAST": lambda s: "" if s["min_score"] is None else f"{s['min_score']:g}", "MAX DROP": lambda s: f"{s['max_drop']:g}",
    "CREATED": since("created_at"),
})  # fmt: skip
ADDED = "scored suite {name}, version {version}: {num_items} items; evaluate with it: ft submit FILE --suite {name}"
REMOVED = "scored suite {name} is removed"


def register(app: typer.Typer) -> None:
    commands = {"add": add, "list": list_suites, "versions": list_versions, "remove": remove}
    add_group(app, "scored-suites", commands, help="Suites of your own that models are evaluated with.", panel="Data")


@remote(ADDED)
def add(
    client: FtClient,
    name: Name,
    file: File,
    metric: Annotated[str | None, typer.Option("--metric", help="exact_match, accuracy, rouge_l, json_valid, ...")] = None,
    grader: Grader = None,
    min_score: Annotated[float | None, typer.Option("--min-score", help="Least score that a model needs, from 0 to 1.")] = None,
    max_drop: Annotated[
        float | None, typer.Option("--max-drop", help="Most that it may fall below its base model; 0.02 by default.")
    ] = None,
) -> Any:
    """Add a suite, or the next version of one: prompts with answers, scored by a metric or a grader."""
    return client.scored_suites.create(
        file, name=name, metric=metric, grader=_read(grader) if grader else None, min_score=min_score, max_drop=max_drop
    )


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not JSON: {error}", code="invalid_grader", param="grader") from None


@remote(SUITES)
def list_suites(client: FtClient) -> Any:
    """List the newest version of each of your scored suites."""
    return client.scored_suites.list().all()


@remote(SUITES)
def list_versions(client: FtClient, name: Name) -> Any:
    """List the versions of a scored suite, newest first."""
    return client.scored_suites.versions(name).all()


@remote(REMOVED)
def remove(client: FtClient, name: Name) -> Any:
    """Remove a scored suite with all of its versions."""
    return client.scored_suites.delete(name)
