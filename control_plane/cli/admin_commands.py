"""``ft admin``: commands for operators on the machine of the control plane; they use the database, not the API."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.cli import (
    base_model_commands,
    cluster_commands,
    deletion_commands,
    doctor_commands,
    maintenance_commands,
    node_commands,
    plan_commands,
    recipe_admin_commands,
    refund_commands,
    release_commands,
    tenant_commands,
    whole_queue_commands,
)
from control_plane.cli.keys import operator_commands, signing_key_commands
from control_plane.cli.local_platform import local
from control_plane.cli.protection import backup_commands, key_rotation_commands
from ft_client.cli.data.suite_commands import ADDED, REMOVED, SUITES, Field, File, Name
from ft_client.cli.data_commands import Map, parse_map
from ft_client.cli.record_views import add_group, document, listing, since

if TYPE_CHECKING:
    from control_plane.datasets.tables import Suite
    from control_plane.platform.context import Platform

ROWS = "{rows} rows of {name}, split {split}, are in {file}"
VERDICTS = listing({
    "JOB": "job_id", "TENANT": "tenant_id", "VERDICT": "code", "FOR": "audience", "SINCE": since("raised_at"), "": "message",
})  # fmt: skip


def register(app: typer.Typer) -> None:
    admin = typer.Typer(help="Operators: tenants, their keys, contamination lists, base models.", no_args_is_help=True)
    groups = tenant_commands.register(admin)
    deletion_commands.register(admin, groups)
    operator_commands.register(admin)
    refund_commands.register_admin(admin)
    lists = {"add": add_suite, "add-benchmark": add_benchmark, "list": list_suites, "remove": remove_suite}
    add_group(admin, "contamination", lists, help="Contamination lists that every tenant's datasets are checked against.")
    add_group(
        admin, "suites", {"add-rows": add_rows, **lists}, help="Rows of capability suites; also the commands of `ft admin contamination`."
    )
    base_model_commands.register(admin)
    release_commands.register(admin)
    recipe_admin_commands.register(admin)
    signing_key_commands.register(admin)
    node_commands.register(admin)
    maintenance_commands.register(admin)
    cluster_commands.register(admin)
    whole_queue_commands.register(admin)
    plan_commands.register(admin)
    admin.command("health")(health)
    doctor_commands.register(admin)
    backup_commands.register(admin)
    key_rotation_commands.register(admin)
    app.add_typer(admin, name="admin", rich_help_panel="Operators")


@local(VERDICTS)
def health(platform: Platform) -> Any:
    """List open health verdicts, newest first: silent, slow or data-starved workloads, and losses that go wrong."""
    from control_plane.attempts import health

    columns = ("job_id", "tenant_id", "model", "attempt", "code", "audience", "level", "message")
    found = health.open_verdicts(platform)
    return [{k: getattr(v, k) for k in columns} | v.data | {"raised_at": v.raised_at.timestamp()} for v in found]


@local(ADDED)
def add_suite(platform: Platform, name: Name, file: File, field: Field = "question", column_map: Map = None) -> Any:
    """Register a contamination list for every tenant; uploads from now on are checked for its items."""
    from control_plane.datasets import suites

    with file.open("rb") as stream:
        return _suite(suites.add(platform, None, stream, name=name, filename=file.name, field=field, column_map=parse_map(column_map)))


@local(ROWS)
def add_rows(
    platform: Platform,
    name: Annotated[
        str, typer.Argument(help="mmlu, hellaswag, arc_challenge, truthfulqa_mc1, truthfulqa_mc2, gsm8k, or a suite of yours.")
    ],
    split: Annotated[str, typer.Argument(help="Its split: dev, train, validation or test.")],
    file: Annotated[Path, typer.Argument(help="Your copy of the published file, .parquet or .jsonl.", exists=True, dir_okay=False)],
) -> Any:
    """Put the rows of a capability suite into FT_EVAL_DATA, after a check of their columns. Nothing is downloaded."""
    from engine.evals.suites import task_files

    settings = platform.settings
    place, rows = task_files.add_rows(name, split, file, task_dirs=settings.eval_task_dirs, data_dir=settings.eval_data_dir)
    return {"name": name, "split": split, "rows": rows, "file": str(place)}


@local(ADDED)
def add_benchmark(
    platform: Platform,
    name: Annotated[str, typer.Argument(help="mmlu, hellaswag, arc_easy, arc_challenge or truthfulqa; gsm8k is built in.")],
    file: File,
) -> Any:
    """Register a public benchmark for every tenant from your copy of its test split, as published by its authors or on the Hub."""
    from control_plane.datasets import suites

    with file.open("rb") as stream:
        return _suite(suites.add_benchmark(platform, stream, name=name, filename=file.name))


@local(SUITES)
def list_suites(platform: Platform) -> Any:
    """List the contamination lists that ship and the operator's."""
    from control_plane.datasets import suites

    return [_suite(one) for one in suites.list_suites(platform, None)]


@local(REMOVED)
def remove_suite(platform: Platform, name: Name) -> Any:
    """Remove an operator's contamination list."""
    from control_plane.datasets import suites

    suites.remove(platform, None, name)
    return {"name": name, "deleted": True}


def _suite(suite: Suite) -> Mapping[str, Any]:
    return document(suite, "id", "name", "field", "num_items", "sha256", "owner", "created_at")
