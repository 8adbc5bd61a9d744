"""Commands that fetch something and show it: ``--json``, tables, fields and sentences by one renderer."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from ft_client.cli.exits import Exit
from ft_client.cli.output import Json, ago, print_json, say, table

Cell = str | Callable[[Any], Any]
"""A field of a row by its name, or a function of the row."""
View = str | Callable[[Any], str | None]
"""Shows a result to people: a sentence with ``{fields}`` of the result and of the arguments, or a function that writes, or returns, one."""
Limit = Annotated[int, typer.Option("--limit", "-n", min=1, max=100)]
NewName = Annotated[str | None, typer.Option("--name")]
_OPENED = dict.fromkeys(("FtClient", "Platform", "Site"), Any)
"""Types of a command's first parameter, which only type checkers import."""


def command(
    opened: Callable[[], AbstractContextManager[Any]], view: View, *, prints: str = "", fails: Callable[[Any], bool] = lambda _found: False
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a command with ``--json`` of a function that takes what `opened` yields, then options, and returns what is shown.

    `prints` is a field that goes to stdout before the view. Exit code 1 if the result `fails`.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        hints = {**get_type_hints(function, localns=_OPENED, include_extras=True), "as_json": Json}
        _, *options = inspect.signature(function).parameters.values()
        shown = [*options, inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False)]

        @functools.wraps(function)
        def run(*, as_json: bool, **arguments: Any) -> None:
            with opened() as first:
                found = function(first, **arguments)
            show(found, view, arguments, prints=prints, as_json=as_json)
            if fails(found):
                raise typer.Exit(Exit.FAILED)

        run.__annotations__ = {p.name: hints[p.name] for p in shown}
        run.__signature__ = inspect.Signature([p.replace(annotation=hints[p.name]) for p in shown])  # type: ignore[attr-defined]
        return run

    return decorate


def show(found: Any, view: View, arguments: Mapping[str, Any] | None = None, *, prints: str = "", as_json: bool) -> None:
    """Write a result as JSON, or as `view` shows it."""
    if as_json:
        print_json(found)
        return
    if prints:
        print(found[prints])
    if text := view(found) if callable(view) else view.format_map({**(arguments or {}), **found}):
        say(text)


def document(record: object, *names: str) -> Mapping[str, Any]:
    """These fields of a record as JSON: moments in Unix seconds, paths as text."""
    return {name: _plain(getattr(record, name)) for name in names}


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return value.timestamp()
    return str(value) if isinstance(value, Path) else value


def given(**options: Any) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def listing(columns: Mapping[str, Cell]) -> Callable[[Any], None]:
    """A table with a row for each object, by heading."""
    return lambda rows: table(tuple(columns), [tuple(cell(row, of) for of in columns.values()) for row in rows])


def cell(row: Any, of: Cell) -> str:
    value = row[of] if isinstance(of, str) else of(row)
    return "" if value is None else str(value)


def job_state(job: Mapping[str, Any]) -> str:
    """Return the state of a job, or of a sweep's trial, in words: one whose model failed its gate was trained."""
    if (job.get("error") or {}).get("code") == "gate_failed":
        return "trained, not approved"
    state = str(job.get("state") or job["status"])
    return f"{state}, not approved" if state == "succeeded" and job.get("adapter_id") and not job.get("fine_tuned_model") else state


def since(name: str) -> Cell:
    """How long ago the moment in field `name` was; empty if there is none."""
    return lambda row: ago(row.get(name))


def count(name: str, missing: str = "-") -> Cell:
    """A number with commas."""
    return lambda row: missing if row[name] is None else f"{row[name]:,}"


def add_commands(app: typer.Typer, panel: str, *commands: Callable[..., None]) -> None:
    for one in commands:
        app.command(rich_help_panel=panel)(one)


def add_group(
    app: typer.Typer, name: str, commands: Mapping[str, Callable[..., Any]], *, help: str, panel: str | None = None
) -> typer.Typer:
    """Add a group with `commands` by name; returns it, for more commands."""
    group = typer.Typer(help=help, no_args_is_help=True)
    for called, one in commands.items():
        group.command(called)(one)
    app.add_typer(group, name=name, rich_help_panel=panel)
    return group
