"""``ft submit``, ``jobs``, ``job``, ``logs``, ``metrics``, ``cancel``, ``pause``, ``resume``."""

from __future__ import annotations

import enum
import hashlib
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.platform.job_states import JobState
from ft_client.cli import job_progress
from ft_client.cli.account.quota_commands import quota_line
from ft_client.cli.data_commands import HUB, Encoding, Map, Policy, RowsAt, accepted, parse_map, parse_policies, send
from ft_client.cli.exits import Exit
from ft_client.cli.job_progress import reason, waiting
from ft_client.cli.output import Json, ago, fields, number, print_json, say
from ft_client.cli.record_views import Limit, add_commands, given, job_state, listing, show, since
from ft_client.cli.remedies import in_commands
from ft_client.cli.remote import connect, remote
from ft_client.queue_messages import evaluation_line

if TYPE_CHECKING:
    from ft_client import FtClient, Record

JobId = Annotated[str, typer.Argument(metavar="ID", help="Job id (`ft jobs` lists them).")]
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
MIXED = re.compile(r"(?P<file>.+),(?P<name>weight|tokens)=(?P<value>[^,]*)")
MICROS = 1_000_000
ENDS = {"succeeded": Exit.OK, "failed": Exit.FAILED, "cancelled": Exit.CANCELLED}


class Gate(enum.StrEnum):
    """What a failed evaluation means for a model."""

    ENFORCE = "enforce"
    MONITOR = "monitor"
    OFF = "off"


def _where(j: Mapping[str, Any]) -> str:
    if error := j.get("error"):
        return str(error["code"])
    if j.get("state") == "evaluating":
        return evaluation_line(j.get("evaluation")) or reason(j)
    if j.get("total_steps") and not j.get("finished_at"):
        return f"step {j.get('step') or 0}/{j['total_steps']}"
    return waiting(j)


def _metrics(checkpoint: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in checkpoint["metrics"].items() if isinstance(value, float))


JOBS = listing({
    "ID": "id", "STATUS": job_state, "MODEL": "model",
    "FINE-TUNED MODEL": lambda j: j.get("fine_tuned_model"), "CREATED": since("created_at"), "": _where,
})  # fmt: skip
CHECKPOINTS = listing({"ID": "id", "STEP": "step_number", "METRICS": _metrics, "CREATED": since("created_at")})


def register(app: typer.Typer) -> None:
    add_commands(app, "Jobs", submit, jobs, job, logs, metrics, checkpoints, cancel, pause, resume)


def parse_hyperparameters(pairs: list[str]) -> Mapping[str, object]:
    """Parse ``n_epochs=3`` into ``{"n_epochs": 3}``."""
    found = {}
    for pair in pairs:
        name, sep, value = pair.partition("=")
        if not (name and sep and value):
            raise typer.BadParameter(f"{pair!r} is not NAME=VALUE; write --hp n_epochs=3")
        found[name] = parse_value(value)
    return found


def parse_value(text: str) -> object:
    """Parse JSON; anything else is text (``auto``)."""
    try:
        return json.loads(text)
    except ValueError:
        return text


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
    mixed = parse_files(files)
    check_given(*(str(one["file"]) for one in mixed), validation_file)
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
            _wait(client, made["id"], as_json=as_json)
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


def parse_files(given: Sequence[str]) -> Sequence[Mapping[str, object]]:
    """Parse ``rows.jsonl,weight=2`` into ``{"file": "rows.jsonl", "weight": 2}``."""
    found = [(text, MIXED.fullmatch(text)) for text in given]
    return [{"file": text} if m is None else {"file": m["file"], m["name"]: parse_value(m["value"])} for text, m in found]


def training_data(client: FtClient, files: Sequence[Mapping[str, object]], options: Mapping[str, Any]) -> Mapping[str, object]:
    """Upload what is local, and return the field of the request that names the data: one file, or the files of a mixture."""
    uploaded = [{**one, "file": file_id_of(client, str(one["file"]), options)} for one in files]
    single = len(files) == 1 and len(files[0]) == 1
    return {"training_file": uploaded[0]["file"]} if single else {"training_files": uploaded}


def check_given(*files: str | None) -> None:
    """Raise a usage error for what is neither a local file, a Hub dataset, nor like the id of a file."""
    for one in files:
        if one is not None and not Path(one).is_file() and not one.startswith(("file-", HUB)):
            raise typer.BadParameter(f"{one!r} is neither a local file nor the id of an uploaded one (file-...)")


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


def _wait(client: FtClient, job_id: str, *, as_json: bool) -> None:
    """Follow the job to its end and exit with the corresponding code."""
    try:
        final = job_progress.follow(client, job_id)
    except KeyboardInterrupt:
        say(f"\nthe job continues; follow it again with `ft job {job_id} --wait`, end it with `ft cancel {job_id}`")
        raise
    show(final, show_job, as_json=as_json)
    code = ENDS.get(str(final["status"]), Exit.FAILED)
    if code is not Exit.OK:
        raise typer.Exit(code)


def cost_so_far(j: Mapping[str, Any]) -> str | None:
    """Return what a job has cost, and how much of it is not billed yet; None for one that has cost nothing."""
    if not j.get("cost_micros"):
        return None
    running = f", of which {j['unbilled_micros'] / MICROS:.4f} by the running attempt" if j["unbilled_micros"] else ""
    return f"{j['cost_micros'] / MICROS:.4f} USD{running}"


def show_job(j: Record) -> None:
    error, warm_start = j.get("error"), j.get("warm_start")
    steps = f"{j.get('step') or 0}/{j['total_steps']}" if j.get("total_steps") else None
    tokens = j.get("trained_tokens")
    fields({
        "job": j["id"], "status": job_state(j), "model": j["model"], "fine-tuned model": j.get("fine_tuned_model"),
        "adapter": j.get("adapter_id"), "created": ago(j.get("created_at")), "finished": ago(j.get("finished_at")),
        "starts from": warm_start["adapter"] if warm_start else None, "sweep": j.get("sweep_id"), "result of": j.get("reused_job_id"),
        "queue": waiting(j) if j.get("queue_position") else None, "waits because": reason(j), "step": steps,
        "evaluation": evaluation_line(j.get("evaluation")), "loss": j.get("loss"), "cost so far": cost_so_far(j),
        "trained tokens": f"{tokens:,}" if tokens else None,
        "error": error["message"] if error else None, "error code": error["code"] if error else None,
    })  # fmt: skip


@remote(JOBS)
def jobs(
    client: FtClient,
    limit: Limit = 20,
    status: Annotated[
        str | None, typer.Option("--status", help="Only jobs with this status: queued, running, evaluating, succeeded, failed, ...")
    ] = None,
) -> Any:
    """List jobs, newest first."""
    shown_word = "state" if status in list(JobState) else "status"  # the column shows the state; OpenAI's words are taken too
    return client.jobs.list(limit=limit, **given(**{shown_word: status})).take(limit)


def job(
    job_id: JobId,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Follow it until it has ended.")] = False,
    as_json: Json = False,
) -> None:
    """Show a job, or follow it to its end (exit code 0 succeeded, 1 failed, 3 cancelled)."""
    with connect() as client:
        if wait:
            _wait(client, job_id, as_json=as_json)
            return
        found = client.jobs.retrieve(job_id)
    show(found, show_job, as_json=as_json)


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
    with connect() as client:
        if training:
            pieces = client.jobs.follow_logs(job_id, attempt=attempt) if follow else [client.jobs.logs(job_id, attempt=attempt)]
            if as_json:
                for line in log_lines(pieces):
                    print_json({"text": line})
            else:
                for piece in pieces:
                    print(piece, end="", flush=True)
            return
        for event in client.jobs.follow(job_id) if follow else reversed(client.jobs.events(job_id).all()):
            if as_json:
                print_json(event)
            else:
                print(f"{_clock(event['created_at'])}  {event['level']:<5} {in_commands(event['message'])}", flush=True)


def metrics(
    job_id: JobId,
    tensorboard: Annotated[
        Path | None, typer.Option("--tensorboard", metavar="DIR", help="Write an event file for `tensorboard --logdir DIR` instead.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the metrics of each step as CSV, during the job or afterwards; with --json as one list."""
    with connect() as client:
        if tensorboard is not None:
            run = tensorboard / job_id
            run.mkdir(parents=True, exist_ok=True)
            file = run / f"events.out.tfevents.0.{job_id}"  # of one name, so that a later call replaces it
            file.write_bytes(client.jobs.tensorboard(job_id))
            if as_json:
                print_json({"file": str(file)})
            else:
                print(file)
        elif as_json:
            print_json(client.jobs.metrics(job_id)["data"])
        else:
            print(client.jobs.metrics_csv(job_id).decode(), end="")


@remote(CHECKPOINTS)
def checkpoints(client: FtClient, job_id: JobId) -> Any:
    """List a job's checkpoints, newest first; `ft submit --warm-start` accepts them."""
    return client.jobs.checkpoints(job_id).all()


def log_lines(pieces: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a text that comes in pieces, each once it is complete, without its line end."""
    rest = ""
    for piece in pieces:
        *complete, rest = (rest + piece).split("\n")
        yield from complete
    if rest:
        yield rest


def _clock(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def _state(job: Mapping[str, Any]) -> str:
    return f"job {job['id']} is {job_state(job)}"


@remote(_state)
def cancel(client: FtClient, job_id: JobId) -> Any:
    """Cancel a job; its last checkpoint stays."""
    return client.jobs.cancel(job_id)


@remote(_state)
def pause(client: FtClient, job_id: JobId) -> Any:
    """Pause a job: it saves a checkpoint and releases its GPUs."""
    return client.jobs.pause(job_id)


@remote(_state)
def resume(client: FtClient, job_id: JobId) -> Any:
    """Queue a paused job again; it resumes from its checkpoint."""
    return client.jobs.resume(job_id)
