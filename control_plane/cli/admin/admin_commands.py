"""``ft admin``: commands for operators on the machine of the control plane; they use the database, not the API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from control_plane.cli.admin import (
    base_model_commands,
    cluster_commands,
    deletion_commands,
    node_commands,
    operator_commands,
    refund_commands,
    tenant_commands,
    whole_queue_commands,
)
from control_plane.cli.admin.local_platform import open_local
from control_plane.cli.output import Json, ago, print_json, say, table
from control_plane.cli.tenant.data.dataset_commands import Map, parse_map
from control_plane.cli.tenant.data.suite_commands import Field, File, Name, listed, show_suite


def register(app: typer.Typer) -> None:
    admin = typer.Typer(help="Operators: tenants, their keys, evaluation suites, base models.", no_args_is_help=True)
    groups = typer.Typer(help="Create, list, change and suspend tenants.", no_args_is_help=True)
    tenant_commands.register(groups)
    admin.add_typer(groups, name="tenants")
    deletion_commands.register(admin, groups)
    operator_commands.register(admin)
    refund_commands.register_admin(admin)
    suites = typer.Typer(help="Evaluation suites that every tenant's datasets are checked against.", no_args_is_help=True)
    for name, command in (("add", add_suite), ("add-benchmark", add_benchmark), ("list", list_suites), ("remove", remove_suite)):
        suites.command(name)(command)
    admin.add_typer(suites, name="suites")
    base_model_commands.register(admin)
    node_commands.register(admin)
    cluster_commands.register(admin)
    whole_queue_commands.register(admin)
    admin.command("health")(health)
    app.add_typer(admin, name="admin", rich_help_panel="Operators")


def health(as_json: Json = False) -> None:
    """List open health verdicts, newest first: silent, slow or data-starved workloads, and losses that go wrong."""
    from control_plane.attempts import health

    with open_local() as platform:
        found = health.open_verdicts(platform)
    if as_json:
        columns = ("job_id", "tenant_id", "model", "attempt", "code", "audience", "level", "message")
        print_json([{k: getattr(v, k) for k in columns} | v.data | {"raised_at": v.raised_at.timestamp()} for v in found])
        return
    rows = [(v.job_id, v.tenant_id, v.code, v.audience, ago(v.raised_at.timestamp()), v.message) for v in found]
    table(("JOB", "TENANT", "VERDICT", "FOR", "SINCE", ""), rows)


def add_suite(name: Name, file: File, field: Field = "question", column_map: Map = None, as_json: Json = False) -> None:
    """Register a suite for every tenant; uploads from now on are checked for its items."""
    from control_plane.datasets import suites

    with open_local() as platform, file.open("rb") as stream:
        made = suites.add(platform, None, stream, name=name, filename=file.name, field=field, column_map=parse_map(column_map))
    show_suite(_suite(made), as_json=as_json)


def add_benchmark(
    name: Annotated[str, typer.Argument(help="mmlu, hellaswag, arc_easy, arc_challenge or truthfulqa; gsm8k is built in.")],
    file: File,
    as_json: Json = False,
) -> None:
    """Register a public benchmark for every tenant from your copy of its test split, as published by its authors or on the Hub."""
    from control_plane.datasets import suites

    with open_local() as platform, file.open("rb") as stream:
        made = suites.add_benchmark(platform, stream, name=name, filename=file.name)
    show_suite(_suite(made), as_json=as_json)


def list_suites(as_json: Json = False) -> None:
    """List the built-in suites and the operator's."""
    from control_plane.datasets import suites

    with open_local() as platform:
        listed([_suite(row) for row in suites.list_suites(platform, None)], as_json=as_json)


def remove_suite(name: Name, as_json: Json = False) -> None:
    """Remove an operator's suite."""
    from control_plane.datasets import suites

    with open_local() as platform:
        suites.remove(platform, None, name)
    if as_json:
        print_json({"name": name, "deleted": True})
        return
    say(f"suite {name} is removed")


def _suite(row: Mapping[Any, Any]) -> dict[str, Any]:
    from control_plane.datasets import suites

    shown = {name: row[name] for name in ("id", "name", "field", "num_items", "sha256")}
    return {**shown, "owner": suites.owner(row), "created_at": row["created_at"] and row["created_at"].timestamp()}
