"""``ft sweep`` and ``ft compare``: several trainings at once, and their differences."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from control_plane.cli.exits import Exit
from control_plane.cli.output import Json, ago, fields, number, print_json, say, table
from control_plane.cli.tenant.jobs.job_commands import check_given, file_id_of, parse_hyperparameters

MICROS = 1_000_000
SweepId = Annotated[str, typer.Argument(metavar="ID", help="Sweep id (`ft sweep list` lists them).")]
FILE_HELP = "A dataset file (it is uploaded first), or the id of an uploaded one."


def register(app: typer.Typer) -> None:
    sweep = typer.Typer(help="Train with several hyperparameters and take the best.", no_args_is_help=True)
    for name, command in (("create", create), ("show", show), ("list", list_sweeps), ("best", best), ("cancel", cancel)):
        sweep.command(name)(command)
    app.add_typer(sweep, name="sweep", rich_help_panel="Jobs")
    app.command(rich_help_panel="Jobs")(compare)


def parse_parameters(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse ``rank=8,16`` into ``{"rank": [8, 16]}``; ``learning_rate=1e-5..1e-3:log`` is a range."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, sep, text = pair.partition("=")
        if not (name and sep and text):
            raise typer.BadParameter(f"{pair!r} is not NAME=VALUES; write -p rank=8,16 or -p learning_rate=1e-5..1e-3:log")
        if ".." in text:
            ends, _, scale = text.partition(":")
            low, _, high = ends.partition("..")
            found[name] = {"min": _value(low), "max": _value(high)} | ({"scale": scale} if scale else {})
        else:
            found[name] = [_value(v) for v in text.split(",")]
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def create(
    file: Annotated[str, typer.Argument(metavar="FILE_OR_ID", help=FILE_HELP)],
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
    from control_plane.cli.tenant.remote import connect

    settings: dict[str, Any] = {"strategy": strategy, "parameters": parse_parameters(parameter), "max_jobs": max_jobs, "seed": seed}
    settings |= {"metric": metric, "goal": goal}
    options: dict[str, Any] = {"column_map": None, "policies": None, "model": None}
    for given in (file, validation_file):
        check_given(given)
    with connect() as client:
        body: dict[str, Any] = {
            "model": model, "training_file": file_id_of(client, file, options), "suffix": suffix, "method": method,
            "hyperparameters": parse_hyperparameters(hp or []) or None,
        }  # fmt: skip
        if validation_file is not None:
            body["validation_file"] = file_id_of(client, validation_file, options)
        requested = {k: v for k, v in body.items() if v is not None}
        varied: Any = {k: v for k, v in settings.items() if v is not None}
        made = client.sweeps.create(**requested, sweep=varied)
        if not wait:
            if as_json:
                print_json(made)
                return
            print(made["id"])
            say(f"{len(made['trials'])} trials; `ft sweep show {made['id']}` shows them")
            return
        say(f"sweep {made['id']}: {len(made['trials'])} trials")
        found = client.sweeps.wait(made["id"])
    _shown(found, as_json=as_json)
    if found["status"] != "succeeded":
        raise typer.Exit(Exit.CANCELLED if found["status"] == "cancelled" else Exit.FAILED)


def show(sweep_id: SweepId, as_json: Json = False) -> None:
    """Show the trials of a sweep, with the best one marked."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        found = client.sweeps.retrieve(sweep_id)
    _shown(found, as_json=as_json)


def list_sweeps(limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=100)] = 20, as_json: Json = False) -> None:
    """List sweeps, newest first."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        found = client.sweeps.list(limit=limit).take(limit)
    if as_json:
        print_json(found)
        return
    rows = [(s["id"], s["status"], s["model"], f"{s['counts']['succeeded']}/{s['counts']['total']}", ago(s["created_at"])) for s in found]
    table(("ID", "STATUS", "MODEL", "SUCCEEDED", "CREATED"), rows)


def best(sweep_id: SweepId, as_json: Json = False) -> None:
    """Show the best trial so far; exit code 1 if none has succeeded with the metric."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        found = client.sweeps.retrieve(sweep_id)
    if found["best"] is None:
        say(f"no trial of {sweep_id} has succeeded with {found['metric']} yet; it is {found['status']}")
        raise typer.Exit(Exit.FAILED)
    if as_json:
        print_json(found["best"])
        return
    one = found["best"]
    fields({"job": one["job_id"], "parameters": _named(one["parameters"]), found["metric"]: one["value"], "model": one["fine_tuned_model"]})


def cancel(sweep_id: SweepId, as_json: Json = False) -> None:
    """Cancel a sweep and its unfinished jobs."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        done = client.sweeps.cancel(sweep_id)
    if as_json:
        print_json(done)
    else:
        say(f"sweep {sweep_id} is {done['status']}")


def compare(
    job_ids: Annotated[list[str], typer.Argument(metavar="JOB JOB ...", help="Ids of two or more jobs.")], as_json: Json = False
) -> None:
    """Compare jobs side by side: the hyperparameters that differ, losses, scores, cost, duration."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        found = client.jobs.compare(job_ids)
    if as_json:
        print_json(found)
        return
    jobs = found["jobs"]
    scores = sorted({name for j in jobs for name in j["eval_metrics"] if not name.startswith("base/")})
    rows = [(name, *(_cell(v) for v in values)) for name, values in found["differing"].items()]
    rows += [(name, *(_cell(j[name]) for j in jobs)) for name in ("status", "final_loss", "eval_loss")]
    rows += [(name, *(_cell(j["eval_metrics"].get(name)) for j in jobs)) for name in scores]
    rows += [("cost USD", *(f"{j['cost_micros'] / MICROS:.4f}" for j in jobs)), ("seconds", *(_cell(j["duration_s"]) for j in jobs))]
    table(("", *(j["id"] for j in jobs)), rows)


def _shown(found: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    chosen = found["best"]["number"] if found["best"] else None
    names = list(found["parameters"])
    rows = [
        (
            "*" if t["number"] == chosen else "", str(t["number"]), *(_cell(t["parameters"][n]) for n in names),
            t["status"] + (" (reused)" if t["reused"] else ""), _cell(t["value"]), t["job_id"] or (t["error"] or {}).get("message", ""),
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
