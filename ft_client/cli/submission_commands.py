"""``ft submit``, ``estimate``, ``sweep`` and ``compare``: trainings, what one would cost, several at once, and their differences."""

from __future__ import annotations

import enum
import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ft_client.cli.account_commands import quota_line
from ft_client.cli.command_options import (
    MICROS,
    Encoding,
    Map,
    Policy,
    RowsAt,
    parse_hyperparameters,
    parse_map,
    parse_policies,
    parse_value,
)
from ft_client.cli.commands import Limit, add_commands, add_group, argument, given, listing, show, since
from ft_client.cli.data_commands import HUB, accepted, send
from ft_client.cli.job_commands import wait_for
from ft_client.cli.job_progress import job_state
from ft_client.cli.output import Exit, Json, ago, fields, number, print_json, say, table
from ft_client.cli.session import connect, remote

if TYPE_CHECKING:
    from ft_client import FtClient, Record

Method = Annotated[str | None, typer.Option("--method", help="sft (the default), cpt, dpo, orpo, kto, simpo; or lora, qlora, full.")]
Adapter = Annotated[str | None, typer.Option("--adapter", help="lora (the default), qlora or full.")]
Recipe = Annotated[str | None, typer.Option("--recipe", help="Recipe for the defaults (`ft recipes list`); chosen by the model if absent.")]
Tier = Annotated[str | None, typer.Option("--tier", help="free, standard or premium; your tenant's own if absent.")]
Spot = Annotated[
    bool,
    typer.Option("--spot", help="Allow spot GPUs, which cost less and can be taken away; not used to replace a model in production."),
]
NumGpus = Annotated[int | None, typer.Option("--num-gpus", help="1, 2, 4, 8, 16 or 32; estimated if absent.")]
TrainingFiles = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE_OR_ID",
        help="A dataset file, or the id of an uploaded one. Several are a mixture: add ,weight=NUMBER or ,tokens=NUMBER to each.",
    ),
]
SweepId = Annotated[str, typer.Argument(metavar="ID", help="Sweep id (`ft sweep list` lists them).")]
MIXED = re.compile(r"(?P<file>.+),(?P<name>weight|tokens)=(?P<value>[^,]*)")
DAY_S, GIB = 86400, 2**30
SWEEPS = listing({
    "ID": "id", "STATUS": "status", "MODEL": "model", "SUCCEEDED": lambda s: f"{s['counts']['succeeded']}/{s['counts']['total']}",
    "CREATED": since("created_at"),
})  # fmt: skip


class Gate(enum.StrEnum):
    """What a failed evaluation means for a model."""

    ENFORCE = "enforce"
    MONITOR = "monitor"
    OFF = "off"


def register(app: typer.Typer) -> None:
    add_commands(app, "Jobs", {
        "submit": submit,
        "estimate": estimate,
        "compare": remote.call("jobs.compare",
            "Compare jobs side by side: the hyperparameters that differ, losses, scores, cost, duration.", _show_comparison,
            job_ids=argument("Ids of two or more jobs.", metavar="JOB", type=list[str])),
    })  # fmt: skip
    add_group(app, "sweep", "Train with several hyperparameters and take the best.", {
        "create": create_sweep,
        "show": remote.call("sweeps.retrieve", "Show the trials of a sweep, with the best one marked.", _show_sweep, sweep_id=SweepId),
        "list": remote.call("sweeps.list", "List sweeps, newest first.", SWEEPS, limit=(Limit, 20)),
        "best": best,
        "cancel": remote.call("sweeps.cancel", "Cancel a sweep and its unfinished jobs.", "sweep {sweep_id} is {status}", sweep_id=SweepId),
    }, panel="Jobs")  # fmt: skip


def submit(
    files: TrainingFiles,
    model: Annotated[str, typer.Option("--model", "-m", help="Base model (`ft models`).")] = "demo-llama-3m",
    validation_file: Annotated[str | None, typer.Option("--validation-file", help="Held-out file or id, for evaluation.")] = None,
    suffix: Annotated[str | None, typer.Option("--suffix", help="Part of the new model's name.")] = None,
    seed: Annotated[int | None, typer.Option("--seed")] = None,
    method: Method = None,
    adapter: Adapter = None,
    recipe: Recipe = None,
    num_gpus: NumGpus = None,
    tier: Tier = None,
    spot: Spot = False,
    hp: Annotated[list[str] | None, typer.Option("--hp", metavar="NAME=VALUE", help="Hyperparameter; may be repeated.")] = None,
    column_map: Map = None,
    policy: Policy = None,
    encoding: Encoding = None,
    rows_at: RowsAt = None,
    wait: Annotated[
        bool, typer.Option("--wait", "-w", help="Show progress until the job has ended; the exit code shows how it ended.")
    ] = False,
    promote: Annotated[
        bool | None,
        typer.Option("--promote/--no-promote", help="Serve the model as soon as it has passed its gate; default, except for experiments."),
    ] = None,
    gate: Annotated[
        Gate, typer.Option("--gate", help="enforce: a model that fails its evaluation is not served; monitor: only reported; off.")
    ] = Gate.ENFORCE,
    experiment: Annotated[
        bool, typer.Option("--experiment", help="The job succeeds whatever its evaluation, which counts once you promote the model.")
    ] = False,
    skip: Annotated[list[str] | None, typer.Option("--skip", metavar="RULE", help="Rule that does not block; may be repeated.")] = None,
    suite: Annotated[
        list[str] | None, typer.Option("--suite", metavar="NAME", help="Scored suite of yours to evaluate with; may be repeated.")
    ] = None,
    wandb_project: Annotated[
        str | None, typer.Option("--wandb-project", help="Send the metrics to this project of Weights & Biases (`ft wandb set`).")
    ] = None,
    warm_start: Annotated[str | None, typer.Option("--warm-start", help="Your model, job or checkpoint to start from.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Train even if one of your earlier jobs trained the same.")] = False,
    as_json: Json = False,
) -> None:
    """Submit a fine-tuning job; files are uploaded first, and several are a mixture. With --wait: exit code 0 succeeded, 1 failed, 3
    cancelled."""
    hyperparameters = parse_hyperparameters(hp or [])
    policies = parse_policies(policy, encoding=encoding, rows_at=rows_at)
    options = {"column_map": parse_map(column_map), "policies": policies, "model": None}
    mixed = parse_files(files, validation_file)
    with connect() as client:
        made = client.jobs.create(**given(
            **training_data(client, mixed, options), model=model, suffix=suffix, seed=seed, method=method,
            hyperparameters=hyperparameters or None, auto_promote=promote, adapter=adapter, recipe=recipe,
            hardware={"num_gpus": num_gpus} if num_gpus else None, tier=tier, spot=spot or None, warm_start=warm_start, force=force or None,
            eval_config=_eval_config(gate, skip, suite, experiment=experiment) or None,
            validation_file=file_id_of(client, validation_file, options),
            integrations=[{"type": "wandb", "wandb": {"project": wandb_project}}] if wandb_project else None,
        ))  # fmt: skip
        quota = made.get("quota")
        if quota is not None and quota["goes_into_overage"]:
            say(f"quota: {quota_line(quota)}")
        if wait:
            say(f"job {made['id']}")
            wait_for(client, made["id"], as_json=as_json)
        elif as_json:
            print_json(made)
        else:
            print(made["id"])
            result = made["fine_tuned_model"] or f"{made['id']}, {made['error']['message'] if made['error'] else made['state']}"
            reused = f"an identical job exists: {result}; use --force to train again"
            say(reused if made["reused"] else f"submitted; `ft job {made['id']} --wait` follows it")


def _eval_config(gate: Gate, skip: Sequence[str] | None, suites: Sequence[str] | None, *, experiment: bool) -> Mapping[str, object]:
    if experiment and gate is not Gate.ENFORCE:
        raise typer.BadParameter(f"--experiment and --gate {gate} exclude each other: an experiment is gated once it is promoted; keep one")
    mode = {"mode": "experiment"} if experiment else {} if gate is Gate.ENFORCE else {"mode": gate.value}
    return {**mode, **{key: list(value) for key, value in (("skip", skip), ("suites", suites)) if value}}


def parse_files(texts: Sequence[str], validation_file: str | None) -> Sequence[Mapping[str, object]]:
    """Parse ``rows.jsonl,weight=2`` into ``{"file": "rows.jsonl", "weight": 2}``.

    Raises a usage error for what is neither a local file, a Hub dataset, nor like the id of a file.
    """
    matches = [(text, MIXED.fullmatch(text)) for text in texts]
    found = [{"file": text} if m is None else {"file": m["file"], m["name"]: parse_value(m["value"])} for text, m in matches]
    for one in (*(str(one["file"]) for one in found), validation_file):
        if one is not None and not Path(one).is_file() and not one.startswith(("file-", HUB)):
            raise typer.BadParameter(f"{one!r} is neither a local file nor the id of an uploaded one (file-...)")
    return found


def training_data(client: FtClient, files: Sequence[Mapping[str, object]], options: Mapping[str, Any]) -> Mapping[str, object]:
    """Upload what is local, and return the field of the request that names the data: one file, or the files of a mixture."""
    uploaded = [{**one, "file": file_id_of(client, str(one["file"]), options)} for one in files]
    single = len(files) == 1 and len(files[0]) == 1
    return {"training_file": uploaded[0]["file"]} if single else {"training_files": uploaded}


def file_id_of(client: FtClient, file: str | None, options: Mapping[str, Any]) -> str | None:
    """Return the id of an uploaded file; a local path or a Hub dataset is uploaded first, unless the same was before. None for None."""
    if file is None or (not Path(file).is_file() and not file.startswith(HUB)):
        return file
    if found := None if file.startswith(HUB) else _uploaded_before(client, Path(file), options):
        say(f"{file} is uploaded already: {found['id']} ({found['filename']}, {ago(found['created_at'])})")
        return str(found["id"])
    say(f"uploading {file}")
    return str(accepted(client, send(client, file, options))["id"])


def _uploaded_before(client: FtClient, file: Path, options: Mapping[str, Any]) -> Record | None:
    """Return the newest valid file with these bytes that is read and checked in the same way and does not expire."""
    with file.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    read_as = (options.get("column_map") or {}, options.get("policies") or {}, options.get("model"))
    for found in client.files.list(purpose="fine-tune", sha256=sha256):
        is_kept = found["status"] == "processed" and found["expires_at"] is None
        if is_kept and (found["column_map"], found["policies"], found["model"]) == read_as:
            return found
    return None


def _show_estimate(found: Mapping[str, Any]) -> None:
    tokens, mixed = found["tokens"], found["training_files"] or ()
    spread = f" (+- {tokens['error']:,})" if tokens["error"] else ""
    fields({
        **({"file": found["training_file"], "dataset": found["dataset_id"]} if not mixed else {}),
        **{f"file {n}": f"{one['file']}, {one['repeats']:.3g} times an epoch ({one['tokens']:,} tokens)" for n, one in enumerate(mixed, 1)},
        "examples": f"{found['num_examples']:,}",
        "tokens": f"{tokens['total']:,} in {found['n_epochs']:g} epochs, {tokens['per_epoch']:,} each{spread}",
        "steps": f"{found['total_steps']:,}", "gpu hours": f"{found['gpu_hours']:.4g} on {found['num_gpus']} x {found['gpu_type']}",
        "memory": _memory(found["memory"]), "result": f"{found['result']['type'].replace('_', ' ')}: {found['result']['detail']}",
        "price": f"{found['price_micros'] / MICROS:.4f} USD", "starts in": _span(found["seconds_to_start"]),
        "finishes in": _span(found["seconds_to_finish"]), "quota": quota_line(found["quota"]),
    })  # fmt: skip
    for assumption in found["assumptions"]:
        print(f"  - {assumption}")


def _memory(found: Mapping[str, Any]) -> str:
    of = f" of {found['gpu_bytes'] / GIB:.0f}" if found["gpu_bytes"] else ""
    largest = max(found["parts"], key=lambda name: found["parts"][name])
    return (
        f"{found['per_gpu_bytes'] / GIB:.1f}{of} GiB on each of {found['num_gpus']} ({found['strategy']}, {found['per_device_batch_size']} "
        f"rows at a time), most of it {largest}"
    )


def _span(seconds: float | None) -> str:
    if seconds is None:
        return "not foreseeable"
    return time.strftime("%H:%M:%S", time.gmtime(seconds)) if seconds < DAY_S else f"{seconds / 3600:.1f} h"


@remote(_show_estimate)
def estimate(
    client: FtClient,
    files: TrainingFiles,
    model: Annotated[str, typer.Option("--model", "-m", help="Base model (`ft models`).")] = "demo-llama-3m",
    validation_file: Annotated[str | None, typer.Option("--validation-file", help="Held-out file or id.")] = None,
    method: Method = None,
    adapter: Adapter = None,
    recipe: Recipe = None,
    num_gpus: NumGpus = None,
    hp: Annotated[list[str] | None, typer.Option("--hp", metavar="NAME=VALUE", help="Hyperparameter; may be repeated.")] = None,
    tier: Tier = None,
    spot: Spot = False,
    column_map: Map = None,
    encoding: Encoding = None,
    rows_at: RowsAt = None,
) -> Any:
    """Estimate tokens, steps, GPU-hours, price, start and finish of a job, and show the assumptions. Submits nothing."""
    options = {"column_map": parse_map(column_map), "policies": parse_policies(None, encoding=encoding, rows_at=rows_at), "model": None}
    hyperparameters = parse_hyperparameters(hp or [])
    mixed = parse_files(files, validation_file)
    return client.jobs.estimate(**given(
        validation_file=file_id_of(client, validation_file, options), method=method, hyperparameters=hyperparameters or None, tier=tier,
        spot=spot or None, adapter=adapter, recipe=recipe, hardware={"num_gpus": num_gpus} if num_gpus else None, model=model,
        **training_data(client, mixed, options),
    ))  # fmt: skip


def create_sweep(
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
    parameters = parse_parameters(parameter)
    settings = given(strategy=strategy, parameters=parameters, max_jobs=max_jobs, seed=seed, metric=metric, goal=goal)
    mixed = parse_files(files, validation_file)
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
    show(found, _show_sweep, as_json=as_json)
    if found["status"] != "succeeded":
        raise typer.Exit(Exit.CANCELLED if found["status"] == "cancelled" else Exit.FAILED)


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


def _show_comparison(found: Mapping[str, Any]) -> None:
    jobs = found["jobs"]
    scores = sorted({name for j in jobs for name in j["eval_metrics"] if not name.startswith("base/")})
    rows = [(name, *(_cell(v) for v in values)) for name, values in found["differing"].items()]
    rows += [(name, *(_cell(j[name]) for j in jobs)) for name in ("status", "final_loss", "eval_loss")]
    rows += [(name, *(_cell(j["eval_metrics"].get(name)) for j in jobs)) for name in scores]
    rows += [("cost USD", *(f"{j['cost_micros'] / MICROS:.4f}" for j in jobs)), ("seconds", *(_cell(j["duration_s"]) for j in jobs))]
    table(("", *(j["id"] for j in jobs)), rows)


def _show_sweep(found: Mapping[str, Any]) -> None:
    best, names = found["best"], list(found["parameters"])
    rows = [
        (
            "*" if best and t["number"] == best["number"] else "", str(t["number"]), *(_cell(t["parameters"][n]) for n in names),
            job_state(t) + (" (reused)" if t["reused"] else ""), _cell(t["value"]), t["job_id"] or (t["error"] or {}).get("message", ""),
        )
        for t in found["trials"]
    ]  # fmt: skip
    table(("", "TRIAL", *(n.upper() for n in names), "STATUS", found["metric"].upper(), "JOB"), rows)
    chosen = f"{_named(best['parameters'])} ({found['metric']} {_cell(best['value'])})" if best else "none yet"
    say(f"sweep {found['id']} is {found['status']}; best: {chosen}; cost {found['cost_micros'] / MICROS:.4f} USD")


def _named(parameters: Mapping[str, Any]) -> str:
    return " ".join(f"{k}={_cell(v)}" for k, v in parameters.items())


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return number(value) if isinstance(value, float) else str(value)
