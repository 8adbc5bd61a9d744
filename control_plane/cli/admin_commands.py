"""``ft admin``: commands for operators on the machine of the control plane; they use the database, not the API."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from control_plane.cli import (
    base_model_commands,
    billing_admin_commands,
    capacity_commands,
    plan_commands,
    protection_commands,
    tenant_commands,
)
from control_plane.cli.local_platform import local
from ft_client.cli.command_options import Map, parse_map
from ft_client.cli.commands import add_commands, add_group, argument, document, listing, since
from ft_client.cli.data_commands import ADDED, REMOVED, SUITES, ListField, ListFile, ListName

if TYPE_CHECKING:
    from control_plane.platform.context import Platform

SUITE = "id name field num_items sha256 owner created_at"
VERDICTS = listing({
    "JOB": "job_id", "TENANT": "tenant_id", "VERDICT": "code", "FOR": "audience", "SINCE": since("raised_at"), "": "message",
})  # fmt: skip


def register(app: typer.Typer) -> None:
    admin = typer.Typer(help="Operators: tenants, their keys, contamination lists, base models.", no_args_is_help=True)
    for module in (tenant_commands, billing_admin_commands, base_model_commands, capacity_commands, plan_commands, protection_commands):
        module.register(admin)
    lists = {
        "add": local.call(_add_list, "Register a contamination list for every tenant; uploads from now on are checked for its items.",
            ADDED, shows=SUITE, name=ListName, file=ListFile, field=(ListField, "question"), column_map=Map),
        "add-benchmark": local.call(_add_benchmark, "Register a public benchmark for every tenant from your copy of its test split, as "
            "published by its authors or on the Hub.", ADDED, shows=SUITE,
            name=argument("mmlu, hellaswag, arc_easy, arc_challenge or truthfulqa; gsm8k is built in."), file=ListFile),
        "list": local.call("control_plane.datasets.suites.list_suites", "List the contamination lists that ship and the operator's.",
            SUITES, shows=SUITE, fixed={"tenant": None}),
        "remove": local.call(_remove_list, "Remove an operator's contamination list.", REMOVED, name=ListName),
    }  # fmt: skip
    add_group(admin, "contamination", "Contamination lists that every tenant's datasets are checked against.", lists)
    add_group(admin, "suites", "Rows of capability suites; also the commands of `ft admin contamination`.", {
        "add-rows": local.call(_add_rows,
            "Put the rows of a capability suite into FT_EVAL_DATA, after a check of their columns. Nothing is downloaded.",
            "{rows} rows of {name}, split {split}, are in {file}",
            name=argument("mmlu, hellaswag, arc_challenge, truthfulqa_mc1, truthfulqa_mc2, gsm8k, or a suite of yours."),
            split=argument("Its split: dev, train, validation or test."),
            file=argument("Your copy of the published file, .parquet or .jsonl.", type=Path, exists=True, dir_okay=False)),
        **lists,
    })  # fmt: skip
    add_commands(admin, None, {
        "health": local.call(_health, "List open health verdicts, newest first: silent, slow or data-starved workloads, and losses that go "
            "wrong.", VERDICTS),
    })  # fmt: skip
    app.add_typer(admin, name="admin", rich_help_panel="Operators")


def _health(platform: Platform) -> Any:
    from control_plane.attempts import health

    names = ("job_id", "tenant_id", "model", "attempt", "code", "audience", "level", "message")
    return [{**document(v, *names), **v.data, "raised_at": v.raised_at.timestamp()} for v in health.open_verdicts(platform)]


def _add_list(platform: Platform, name: str, file: Path, field: str, column_map: str | None = None) -> Any:
    from control_plane.datasets import suites

    with file.open("rb") as stream:
        return suites.add(platform, None, stream, name=name, filename=file.name, field=field, column_map=parse_map(column_map))


def _add_benchmark(platform: Platform, name: str, file: Path) -> Any:
    from control_plane.datasets import suites

    with file.open("rb") as stream:
        return suites.add_benchmark(platform, stream, name=name, filename=file.name)


def _remove_list(platform: Platform, name: str) -> Mapping[str, Any]:
    from control_plane.datasets import suites

    suites.remove(platform, None, name)
    return {"name": name, "deleted": True}


def _add_rows(platform: Platform, name: str, split: str, file: Path) -> Mapping[str, Any]:
    from engine.evals import add_suite_rows

    settings = platform.settings
    place, rows = add_suite_rows(name, split, file, task_dirs=settings.eval_task_dirs, data_dir=settings.eval_data_dir)
    return {"name": name, "split": split, "rows": rows, "file": str(place)}
