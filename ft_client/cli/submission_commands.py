"""``ft sweep`` and ``ft compare``: several trainings at once, and their differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ft_client.cli.exits import Exit
from ft_client.cli.job_commands import (
    TrainingFiles,
    check_given,
    file_id_of,
    parse_files,
    parse_hyperparameters,
    parse_value,
    training_data,
)
from ft_client.cli.output import Json, fields, number, print_json, say, table
from ft_client.cli.record_views import Limit, add_commands, add_group, given, job_state, listing, show, since
from ft_client.cli.remote import connect, remote

if TYPE_CHECKING:
    from ft_client import FtClient

MICROS = 1_000_000
SweepId = Annotated[str, typer.Argument(metavar="ID", help="Sweep id (`ft sweep list` lists them).")]
SWEEPS = listing({
    "ID": "id", "STATUS": "status", "MODEL": "model", "SUCCEEDED": lambda s: f"{s['counts']['succeeded']}/{s['counts']['total']}",
    "CREATED": since("created_at"),
})  # fmt: skip


def register(app: typer.Typer) -> None:
    add_group(app, "sweep", {
        "create": create, "show": show_sweep, "list": list_sweeps, "best": best, "cancel": cancel,
    }, help="Train with several hyperparameters and take the best.", panel="Jobs")  # fmt: skip
    add_commands(app, "Jobs", compare)


def parse_parameters(pairs: Sequence[str]) -> Mapping[str, object]:
    """Parse ``rank=8,16`` into ``{"rank": [8, 16]}``; ``learning_rate=1e-5..1e-3:log`` is a range."""
    found: dict[str, object] = {}
    for pair in pairs:
        name, sep, text = pair.partition("=")
        if not (name and sep and text):
            raise typer.BadParameter(f"{pair!r} is not NAME=VALUES; write -p rank=8,16 or -p learning_rate=1e-5..1e-3:log")
        if ".." in text:
            ends, _, scale = text.partition(":")
            low, _, high = ends.partition("..")
            found[name] = {"min": parse_value(low), "max": parse_value(high)} | ({"scale": scale} if scale else {})
        else:
            found[name] = [parse_value(v) for v in text.split(",")]
    return found


def create(
    files: TrainingFiles,
    parameter: Annotated[list[str], typer.Option("--param", "-p", metavar="NAME=VALUES", help="rank=8,16 or learning_rate=1e-5..1e-3:log")],
    model: Annotated[str, typer.Option("--model", "-m", help="Base model (`ft models`), or an adapter to start from.")] = "demo-llama-3m",
    strategy: Annotated[str, typer.Option("--strategy", help="grid or random.")] = "grid",
    max_jobs: Annotated[int | None, typer.Option("--max-jobs", help="Most jobs to submit.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of the draws and of every training.")] = None,
    metric: Annotated[str | None, typer.Option("--metric", help="eval_loss, train_loss, or SUITE/METRIC of the evaluation report.")] = None,
    goal: Annotated[str | None, typer.Option("--goal", help="minimize or maximize.")] = None,
    validation_file: Annotated[str | None, typer.Option("--validation-file", help="Held-out file or id.")] = None,
    suffix: Annotated[str | None, typer.Option("--suffix", help="Part of the new models' names.")] = None,
    method: Annotated[str | None, typer.Option("--method", help="supervised, lora, ...")] = None,
    hp: Annotated[list[str] | None, typer.Option("--hp", metavar="NAME=VALUE", help="Hyperparameter of all trials.")] = None,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Wait until every trial has ended.")] = False,
    as_json: Json = False,
) -> None:
    """Submit a job for each combination; jobs beyond your limit wait in the sweep."""
    settings = given(
        strategy=strategy, parameters=parse_parameters(parameter), max_jobs=max_jobs, seed=seed, metric=metric, goal=goal
    )  # fmt: skip
    mixed = parse_files(files)
    check_given(*(str(one["file"]) for one in mixed), validation_file)
    with connect() as client:
        made = client.sweeps.create(sweep=settings, **given(
            **training_data(client, mixed, {}), model=model, suffix=suffix, method=method,
            hyperparameters=parse_hyperparameters(hp or []) or None, validation_file=file_id_of(client, validation_file, {}),
        ))  # fmt: skip
        if not wait:
            show(made, lambda m: f"{len(m['trials'])} trials; `ft sweep show {m['id']}` shows them", prints="id", as_json=as_json)
            return
        say(f"sweep {made['id']}: {len(made['trials'])} trials")
        found = client.sweeps.wait(made["id"])
    show(found, _show, as_json=as_json)
    if found["status"] != "succeeded":
        raise typer.Exit(Exit.CANCELLED if found["status"] == "cancelled" else Exit.FAILED)


@remote(lambda found: _show(found))
def show_sweep(client: FtClient, sweep_id: SweepId) -> Any:
    """Show the trials of a sweep, with the best one marked."""
    return client.sweeps.retrieve(sweep_id)


@remote(SWEEPS)
def list_sweeps(client: FtClient, limit: Limit = 20) -> Any:
    """List sweeps, newest first."""
    return client.sweeps.list(limit=limit).take(limit)


def best(sweep_id: SweepId, as_json: Json = False) -> None:
    """Show the best trial so far; exit code 1 if none has succeeded with the metric."""
    with connect() as client:
        found = client.sweeps.retrieve(sweep_id)
    one = found["best"]
    if as_json:
        print_json(one)
    elif one is not None:
        fields({
            "job": one["job_id"], "status": job_state(one), "parameters": _named(one["parameters"]), found["metric"]: one["value"],
            "model": one["fine_tuned_model"], "next": f"ft promote {one['adapter_id']}",
        })  # fmt: skip
    if one is None:
        say(f"no trial of {sweep_id} has succeeded with {found['metric']} yet; it is {found['status']}")
        raise typer.Exit(Exit.FAILED)


@remote("sweep {sweep_id} is {status}")
def cancel(client: FtClient, sweep_id: SweepId) -> Any:
    """Cancel a sweep and its unfinished jobs."""
    return client.sweeps.cancel(sweep_id)


def _compared(found: Mapping[str, Any]) -> None:
    jobs = found["jobs"]
    scores = sorted({name for j in jobs for name in j["eval_metrics"] if not name.startswith("base/")})
    rows = [(name, *(_cell(v) for v in values)) for name, values in found["differing"].items()]
    rows += [(name, *(_cell(j[name]) for j in jobs)) for name in ("status", "final_loss", "eval_loss")]
    rows += [(name, *(_cell(j["eval_metrics"].get(name)) for j in jobs)) for name in scores]
    rows += [("cost USD", *(f"{j['cost_micros'] / MICROS:.4f}" for j in jobs)), ("seconds", *(_cell(j["duration_s"]) for j in jobs))]
    table(("", *(j["id"] for j in jobs)), rows)


@remote(_compared)
def compare(client: FtClient, job_ids: Annotated[list[str], typer.Argument(metavar="JOB", help="Ids of two or more jobs.")]) -> Any:
    """Compare jobs side by side: the hyperparameters that differ, losses, scores, cost, duration."""
    return client.jobs.compare(job_ids)


def _show(found: Mapping[str, Any]) -> None:
    chosen = found["best"]["number"] if found["best"] else None
    names = list(found["parameters"])
    rows = [
        (
            "*" if t["number"] == chosen else "", str(t["number"]), *(_cell(t["parameters"][n]) for n in names),
            job_state(t) + (" (reused)" if t["reused"] else ""), _cell(t["value"]), t["job_id"] or (t["error"] or {}).get("message", ""),
        )
        for t in found["trials"]
    ]  # fmt: skip
    table(("", "TRIAL", *(n.upper() for n in names), "STATUS", found["metric"].upper(), "JOB"), rows)
    say(f"sweep {found['id']} is {found['status']}; best: {_best(found) or 'none yet'}; cost {found['cost_micros'] / MICROS:.4f} USD")


def _best(found: Mapping[str, Any]) -> str:
    one = found["best"]
    return "" if one is None else f"{_named(one['parameters'])} ({found['metric']} {_cell(one['value'])})"


def _named(parameters: Mapping[str, Any]) -> str:
    return " ".join(f"{k}={_cell(v)}" for k, v in parameters.items())


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return number(value) if isinstance(value, float) else str(value)
