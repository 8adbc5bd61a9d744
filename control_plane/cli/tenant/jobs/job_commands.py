"""``ft submit``, ``jobs``, ``job``, ``logs``, ``metrics``, ``cancel``, ``pause``, ``resume``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from control_plane.cli.exits import Exit
from control_plane.cli.output import Json, ago, fields, number, print_json, say, table
from control_plane.cli.remedies import in_commands
from control_plane.cli.tenant.account.quota_commands import quota_line
from control_plane.cli.tenant.data.dataset_commands import HUB, Encoding, Map, Policy, RowsAt, accepted, parse_map, parse_policies, send
from control_plane.cli.tenant.job_progress import events_of, reason, waiting

if TYPE_CHECKING:
    from control_plane.client import FtClient, Record

JobId = Annotated[str, typer.Argument(metavar="ID", help="Job id (`ft jobs` lists them).")]
Method = Annotated[str | None, typer.Option("--method", help="sft (the default), cpt, dpo, orpo, kto, simpo; or lora, qlora, full.")]
Adapter = Annotated[str | None, typer.Option("--adapter", help="lora (the default), qlora or full.")]
Recipe = Annotated[str | None, typer.Option("--recipe", help="Recipe for the defaults (`ft recipes list`); chosen by the model if absent.")]
NumGpus = Annotated[int | None, typer.Option("--num-gpus", help="1, 2, 4, 8, 16 or 32; estimated if absent.")]
ENDS = {"succeeded": Exit.OK, "failed": Exit.FAILED, "cancelled": Exit.CANCELLED}


def register(app: typer.Typer) -> None:
    for command in (submit, jobs, job, logs, metrics, checkpoints, cancel, pause, resume):
        app.command(rich_help_panel="Jobs")(command)


def parse_hyperparameters(pairs: list[str]) -> dict[str, Any]:
    """Parse ``n_epochs=3`` into ``{"n_epochs": 3}``: values are JSON if possible, else text (``auto``)."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, sep, value = pair.partition("=")
        if not (name and sep and value):
            raise typer.BadParameter(f"{pair!r} is not NAME=VALUE; write --hp n_epochs=3")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def submit(
    file: Annotated[str, typer.Argument(metavar="FILE_OR_ID", help="A dataset file, or the id of an uploaded one.")],
    model: Annotated[str, typer.Option("--model", "-m", help="Base model (`ft models`).")] = "demo-llama-3m",
    validation_file: Annotated[str | None, typer.Option("--validation-file", help="Held-out file or id, for evaluation.")] = None,
    suffix: Annotated[str | None, typer.Option("--suffix", help="Part of the new model's name.")] = None,
    seed: Annotated[int | None, typer.Option("--seed")] = None,
    method: Method = None,
    adapter: Adapter = None,
    recipe: Recipe = None,
    num_gpus: NumGpus = None,
    hp: Annotated[list[str] | None, typer.Option("--hp", metavar="NAME=VALUE", help="Hyperparameter; may be repeated.")] = None,
    column_map: Map = None,
    policy: Policy = None,
    encoding: Encoding = None,
    rows_at: RowsAt = None,
    wait: Annotated[
        bool, typer.Option("--wait", "-w", help="Show progress until the job has ended; the exit code shows how it ended.")
    ] = False,
    promote: Annotated[bool, typer.Option("--promote/--no-promote", help="Serve the model as soon as it has passed its gate.")] = True,
    warm_start: Annotated[str | None, typer.Option("--warm-start", help="Your adapter, job or checkpoint to start from.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Train even if one of your earlier jobs trained the same.")] = False,
    as_json: Json = False,
) -> None:
    """Submit a fine-tuning job; a file is uploaded first. With --wait: exit code 0 succeeded, 1 failed, 3 cancelled."""
    from control_plane.cli.tenant.remote import connect

    hyperparameters = parse_hyperparameters(hp or [])
    policies = parse_policies(policy, encoding=encoding, rows_at=rows_at)
    options = {"column_map": parse_map(column_map), "policies": policies, "model": None}
    for given in (file, validation_file):
        check_given(given)
    with connect() as client:
        body: dict[str, Any] = {
            "model": model, "training_file": file_id_of(client, file, options), "suffix": suffix, "seed": seed, "method": method,
            "hyperparameters": hyperparameters or None, "auto_promote": None if promote else False, "adapter": adapter, "recipe": recipe,
            "hardware": {"num_gpus": num_gpus} if num_gpus else None, "warm_start": warm_start, "force": force or None,
        }  # fmt: skip
        if validation_file is not None:
            body["validation_file"] = file_id_of(client, validation_file, options)
        made = client.jobs.create(**{k: v for k, v in body.items() if v is not None})
        quota = made.get("quota")
        if quota is not None and quota["goes_into_overage"]:
            say(f"quota: {quota_line(quota)}")
        if wait:
            say(f"job {made['id']}")
            _wait(client, made["id"], as_json=as_json)
        elif as_json:
            print_json(made)
        else:
            print(made["id"])
            reused = f"an identical job exists: {made['fine_tuned_model']}; use --force to train again"
            say(reused if made["reused"] else f"submitted; `ft job {made['id']} --wait` follows it")


def check_given(given: str | None) -> None:
    """Raise a usage error for what is neither a local file, a Hub dataset, nor like the id of a file."""
    if given is not None and not Path(given).is_file() and not given.startswith(("file-", HUB)):
        raise typer.BadParameter(f"{given!r} is neither a local file nor the id of an uploaded one (file-...)")


def file_id_of(client: FtClient, given: str, options: Mapping[str, Any]) -> str:
    """Return the id of an uploaded file; a local path or a Hub dataset is uploaded first."""
    if not Path(given).is_file() and not given.startswith(HUB):
        return given
    say(f"uploading {given}")
    return str(accepted(client, send(client, given, options))["id"])


def _wait(client: FtClient, job_id: str, *, as_json: bool) -> None:
    """Follow the job to its end and exit with the corresponding code."""
    from control_plane.cli.tenant.job_progress import follow

    try:
        final = follow(client, job_id)
    except KeyboardInterrupt:
        say(f"\nthe job continues; follow it again with `ft job {job_id} --wait`, end it with `ft cancel {job_id}`")
        raise
    if as_json:
        print_json(final)
    else:
        show_job(final)
    code = ENDS.get(str(final["status"]), Exit.FAILED)
    if code is not Exit.OK:
        raise typer.Exit(code)


def show_job(j: Record) -> None:
    error, warm_start = j.get("error"), j.get("warm_start")
    steps = f"{j.get('step') or 0}/{j['total_steps']}" if j.get("total_steps") else None
    tokens = j.get("trained_tokens")
    fields({
        "job": j["id"], "status": j.get("state") or j["status"], "model": j["model"], "fine-tuned model": j.get("fine_tuned_model"),
        "adapter": j.get("adapter_id"), "created": ago(j.get("created_at")), "finished": ago(j.get("finished_at")),
        "starts from": warm_start["adapter"] if warm_start else None, "sweep": j.get("sweep_id"), "result of": j.get("reused_job_id"),
        "queue": waiting(j) if j.get("queue_position") else None, "waits because": reason(j), "step": steps,
        "loss": j.get("loss"), "trained tokens": f"{tokens:,}" if tokens else None, "error": error["message"] if error else None,
        "error code": error["code"] if error else None,
    })  # fmt: skip


def jobs(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=100)] = 20,
    as_json: Json = False,
) -> None:
    """List jobs, newest first."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        found = client.jobs.list(limit=limit).take(limit)
    if as_json:
        print_json(found)
        return
    rows = [
        (j["id"], str(j.get("state") or j["status"]), j["model"], j.get("fine_tuned_model") or "", ago(j["created_at"]), _where(j))
        for j in found
    ]
    table(("ID", "STATUS", "MODEL", "FINE-TUNED MODEL", "CREATED", ""), rows)


def _where(j: Record) -> str:
    if error := j.get("error"):
        return str(error["code"])
    if j.get("total_steps") and not j.get("finished_at"):
        return f"step {j.get('step') or 0}/{j['total_steps']}"
    return waiting(j)


def job(
    job_id: JobId,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Follow it until it has ended.")] = False,
    as_json: Json = False,
) -> None:
    """Show a job, or follow it to its end (exit code 0 succeeded, 1 failed, 3 cancelled)."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        if wait:
            _wait(client, job_id, as_json=as_json)
            return
        found = client.jobs.retrieve(job_id)
    if as_json:
        print_json(found)
    else:
        show_job(found)


def logs(
    job_id: JobId,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow until the job, or with --training the attempt, has ended.")
    ] = False,
    training: Annotated[bool, typer.Option("--training", "-t", help="Show the training's own output instead of the job's events.")] = False,
    attempt: Annotated[int | None, typer.Option("--attempt", min=1, help="With --training; default: the last one.")] = None,
    as_json: Json = False,
) -> None:
    """Print a job's events, oldest first, or its training log; with --json one object per line."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        if training:
            pieces = client.jobs.follow_logs(job_id, attempt=attempt) if follow else [client.jobs.logs(job_id, attempt=attempt)]
            for piece in pieces:
                print(piece, end="", flush=True)
            return
        for event in events_of(client, job_id, until_end=follow):
            if as_json:
                print_json(event)
            else:
                print(f"{_clock(event['created_at'])}  {event['level']:<5} {in_commands(event['message'])}", flush=True)


def metrics(job_id: JobId, as_json: Json = False) -> None:
    """Print the metrics of each step as CSV, during the job or afterwards; with --json as one list."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        if as_json:
            print_json(client.jobs.metrics(job_id)["data"])
        else:
            print(client.jobs.metrics_csv(job_id).decode(), end="")


def checkpoints(job_id: JobId, as_json: Json = False) -> None:
    """List a job's checkpoints, newest first; `ft submit --warm-start` accepts them."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        found = client.jobs.checkpoints(job_id).all()
    if as_json:
        print_json(found)
        return
    rows = [(c["id"], str(c["step_number"]), _metrics(c["metrics"]), ago(c["created_at"])) for c in found]
    table(("ID", "STEP", "METRICS", "CREATED"), rows)


def _metrics(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in found.items() if isinstance(value, float))


def _clock(unix_s: float) -> str:
    import time

    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def cancel(job_id: JobId, as_json: Json = False) -> None:
    """Cancel a job; its last checkpoint stays."""
    _act("cancel", job_id, as_json=as_json)


def pause(job_id: JobId, as_json: Json = False) -> None:
    """Pause a job: it saves a checkpoint and releases its GPUs."""
    _act("pause", job_id, as_json=as_json)


def resume(job_id: JobId, as_json: Json = False) -> None:
    """Queue a paused job again; it resumes from its checkpoint."""
    _act("resume", job_id, as_json=as_json)


def _act(method: Literal["cancel", "pause", "resume"], job_id: str, *, as_json: bool) -> None:
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        act: Callable[[str], Record] = getattr(client.jobs, method)
        changed = act(job_id)
    if as_json:
        print_json(changed)
    else:
        say(f"job {job_id} is {changed.get('state') or changed['status']}")
