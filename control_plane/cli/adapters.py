"""``ft models``, ``adapters``, ``promote``, ``rollback``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from control_plane.cli.output import Json, ago, percent, print_json, say, table

AdapterId = Annotated[str, typer.Argument(metavar="ID", help="Adapter id or model name (`ft adapters` lists them).")]


def register(app: typer.Typer) -> None:
    for command in (models, adapters, promote, rollback):
        app.command(rich_help_panel="Models")(command)


def models(as_json: Json = False) -> None:
    """List base models and your own."""
    from control_plane.cli.remote import connect

    with connect() as client:
        found = client.models()
    if as_json:
        print_json(found)
        return
    table(("MODEL", "OWNER", "CREATED"), [(m["id"], m["owned_by"], ago(m["created"]) if m.get("created") else "") for m in found])


def adapters(as_json: Json = False) -> None:
    """List adapters, newest first: stage, what serves them, and their score beside the base's."""
    from control_plane.cli.remote import connect

    with connect() as client:
        found = client.adapters()
    if as_json:
        print_json(found)
        return
    rows = [(a["id"], a["name"], a["stage"], a["observed"], _score(a), ago(a.get("created_at"))) for a in found]
    table(("ID", "MODEL", "STAGE", "SERVED", "SCORE (BASE)", "CREATED"), rows)


def _score(a: dict[str, Any]) -> str:
    """What its method is judged by: the preferences that it tells apart, right answers to the letter, or perplexity of free text."""
    metrics = a.get("metrics") or {}
    for name in ("validation/preference_accuracy", "holdout/exact_match"):
        if metrics.get(name):
            return f"{name.rpartition('/')[2].replace('_', ' ')} {percent(metrics[name])} ({percent(metrics.get(f'base/{name}'))})"
    own, base = metrics.get("validation/perplexity"), metrics.get("base/validation/perplexity")
    return "" if own is None or base is None else f"perplexity {own:.2f} ({base:.2f})"


def promote(adapter: AdapterId, as_json: Json = False) -> None:
    """Put an adapter into production: it is loaded on the fleet and answers under its name."""
    from control_plane.cli.remote import connect

    with connect() as client:
        changed = client.promote(adapter)
    if as_json:
        print_json(changed)
        return
    say(f"{changed['name']} is in {changed['stage']}; on the inference servers it is {changed['observed']}")
    if changed["detail"]:
        say(f"  {changed['detail']}")


def rollback(adapter: AdapterId, as_json: Json = False) -> None:
    """Withdraw a production adapter in favour of the one promoted before it."""
    from control_plane.cli.remote import connect

    with connect() as client:
        done = client.rollback(adapter)
    if as_json:
        print_json(done)
        return
    say(f"serving {done['serving']['name']} again; {done['withdrawn']['name']} is withdrawn")
