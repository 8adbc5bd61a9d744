"""Commands as tables: what each one calls, its options, and how its result is shown, as text or with ``--json``.

    add_group(app, "keys", "List, create and revoke your tenant's API keys.", {
        "show": remote.call("api_keys.retrieve", "Show a key, without its secret.", _show_key, key_id=KeyId),
        "revoke": remote.call("api_keys.revoke", "Revoke a key immediately.", "key {id} ({name}) is revoked", key_id=KeyId),
    })

A command with logic of its own is a function; it is decorated with ``@remote(view)`` if it returns what is shown.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from ft_client.cli.output import Exit, Json, ago, print_json, say, table

Cell = str | Callable[[Any], Any]
"""A field of a row by its name, or a function of the row."""
View = str | Callable[[Any], str | None]
"""Shows a result to people: a sentence with ``{fields}`` of the result and of the arguments, or a function that writes, or returns, one."""
Function = str | Callable[..., Any]
"""What a command calls, with what it has opened and the options that were given: by its name, or a function."""
Limit = Annotated[int, typer.Option("--limit", "-n", min=1, max=100)]
_OPENED = dict.fromkeys(("FtClient", "Platform", "Settings", "Site"), Any)
"""Types of a command's first parameter, which only type checkers import."""


def imported(name: str) -> Callable[..., Any]:
    """Return the function with this full name; its module is imported now."""
    module, _, function = name.rpartition(".")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found


def _never(_found: Any) -> bool:
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Commands:
    """Makes commands with ``--json`` of functions that take what `opened` yields, then options."""

    opened: Callable[[], AbstractContextManager[Any]]
    find: Callable[[str], Callable[..., Any]] = imported
    """Returns the function that a table names."""

    def __call__(self, view: View, *, prints: str = "", fails: Callable[[Any], bool] = _never) -> Callable[[Callable[..., Any]], Any]:
        """Decorate a function that returns what is shown. `prints` is a field that goes to stdout before the view; exit code 1 if the
        result `fails`."""

        def decorate(function: Callable[..., Any]) -> Callable[..., None]:
            hints = get_type_hints(function, localns=_OPENED, include_extras=True)
            _, *parameters = inspect.signature(function).parameters.values()
            options = {p.name: (hints[p.name], p.default) for p in parameters}
            return self._made(function, inspect.getdoc(function) or "", view, options, prints=prints, fails=fails)

        return decorate

    def call(
        self,
        function: Function,
        help: str,
        view: View,
        /,
        *,
        prints: str = "",
        fails: Callable[[Any], bool] = _never,
        fixed: Mapping[str, Any] | None = None,
        shows: str = "",
        **options: Any,
    ) -> Callable[..., None]:
        """Return a command that passes on its options if they were given; an option is a type, or a type with its default.

        `fixed` are further arguments, or functions that return them. Of a record, the fields that `shows` names are the result.
        """

        def run(opened: Any, **arguments: Any) -> Any:
            target = self.find(function) if isinstance(function, str) else function
            found = target(
                opened, **given(**arguments), **{name: value() if callable(value) else value for name, value in (fixed or {}).items()}
            )
            if hasattr(found, "take"):  # pages of a list
                found = found.take(arguments["limit"]) if "limit" in arguments else found.all()
            return documents(found, *shows.split()) if shows else found

        run.function, run.passes = function, (*options, *(fixed or {}))  # type: ignore[attr-defined]  # for tests
        defaults = {name: option if isinstance(option, tuple) else (option, _default(option)) for name, option in options.items()}
        return self._made(run, help, view, defaults, prints=prints, fails=fails)

    def _made(
        self,
        function: Callable[..., Any],
        help: str,
        view: View,
        options: Mapping[str, tuple[Any, Any]],
        *,
        prints: str,
        fails: Callable[[Any], bool],
    ) -> Callable[..., None]:
        def run(*, as_json: bool, **arguments: Any) -> None:
            with self.opened() as first:
                found = function(first, **arguments)
            show(found, view, arguments, prints=prints, as_json=as_json)
            if fails(found):
                raise typer.Exit(Exit.FAILED)

        every = {**options, "as_json": (Json, False)}
        keyword = inspect.Parameter.KEYWORD_ONLY
        run.__name__, run.__doc__, run.__wrapped__ = getattr(function, "__name__", "run"), help, function  # type: ignore[attr-defined]
        run.__annotations__ = {name: kind for name, (kind, _) in every.items()}
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, keyword, default=default, annotation=kind) for name, (kind, default) in every.items()]
        )
        return run


def _default(kind: Any) -> Any:
    """Return the default of an option by its type: none for a text that may be missing, false for a flag; a plain type is required."""
    inner = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if NoneType in get_args(inner):
        return None
    return False if inner is bool else inspect.Parameter.empty


def option(name: str, help: str = "", *others: str, type: Any = str | None, **attributes: Any) -> Any:
    """Return the type of an option; by default one that takes a text and may be missing."""
    return Annotated[type, typer.Option(name, *others, help=help or None, **attributes)]


def argument(help: str = "", *, type: Any = str, **attributes: Any) -> Any:
    """Return the type of an argument."""
    return Annotated[type, typer.Argument(help=help or None, **attributes)]


NewName = option("--name")


def show(found: Any, view: View, arguments: Mapping[str, Any] | None = None, *, prints: str = "", as_json: bool) -> None:
    """Write a result as JSON, or as `view` shows it."""
    if as_json:
        print_json(found)
        return
    if prints:
        print(found[prints])
    if text := view(found) if callable(view) else view.format_map({**(arguments or {}), **found}):
        say(text)


def documents(found: Any, *names: str) -> Any:
    """Return these fields of a record, or of each of a list, as JSON."""
    if isinstance(found, Iterable):
        return [document(each, *names) for each in found]
    return document(found, *names)


def document(record: object, *names: str) -> Mapping[str, Any]:
    """Return these fields of a record as JSON: moments in Unix seconds, paths as text."""
    return {name: _plain(getattr(record, name)) for name in names}


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return value.timestamp()
    return str(value) if isinstance(value, Path) else value


def given(**options: Any) -> dict[str, Any]:
    """Return the options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def listing(columns: Mapping[str, Cell]) -> Callable[[Any], None]:
    """Return a view: a table with a row for each object, by heading."""
    return lambda rows: table(tuple(columns), [tuple(cell(row, of) for of in columns.values()) for row in rows])


def cell(row: Any, of: Cell) -> str:
    value = row[of] if isinstance(of, str) else of(row)
    return "" if value is None else str(value)


def since(name: str) -> Cell:
    """How long ago the moment in field `name` was; empty if there is none."""
    return lambda row: ago(row.get(name))


def count(name: str, missing: str = "-") -> Cell:
    """A number with commas."""
    return lambda row: missing if row[name] is None else f"{row[name]:,}"


def add_commands(app: typer.Typer, panel: str | None, commands: Mapping[str, Callable[..., Any]]) -> None:
    """Add commands by name."""
    for name, command in commands.items():
        app.command(name, rich_help_panel=panel)(command)


def add_group(
    app: typer.Typer, name: str, help: str, commands: Mapping[str, Callable[..., Any]], *, panel: str | None = None
) -> typer.Typer:
    """Add a group with `commands` by name; returns it."""
    group = typer.Typer(help=help, no_args_is_help=True)
    add_commands(group, None, commands)
    app.add_typer(group, name=name, rich_help_panel=panel)
    return group
