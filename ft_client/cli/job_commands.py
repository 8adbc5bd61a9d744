"""``ft jobs``, ``job``, ``logs``, ``metrics``, ``checkpoints``, ``cancel``, ``pause``, ``resume``, ``queue`` and ``recipes``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from core.epoch_time import span_words
from ft_client.cli import job_progress
from ft_client.cli.command_options import MICROS
from ft_client.cli.commands import Limit, add_commands, add_group, argument, listing, option, show, since
from ft_client.cli.job_progress import job_state, reason, waiting, wall_clock
from ft_client.cli.output import Exit, Json, ago, console, counted, escape, fields, number, print_json, say, table
from ft_client.cli.remedies import in_commands
from ft_client.cli.session import connect, remote
from ft_client.queue_messages import by_tier_words, evaluation_line, held_for, waiting_line

if TYPE_CHECKING:
    from ft_client import FtClient, Record

JobId = Annotated[str, typer.Argument(metavar="ID", help="Job id (`ft jobs` lists them).")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Refresh every two seconds until interrupted.")]
RecipeMethod = option("--method", "sft, cpt, dpo, orpo, kto or simpo: its defaults are shown.", type=str)
ENDS = {"succeeded": Exit.OK, "failed": Exit.FAILED, "cancelled": Exit.CANCELLED}
EVERY_S = 2.0
"""Seconds between polls of the queue: scheduling cycles come every second or two."""


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


def _models(recipe: Record) -> str:
    return ", ".join(recipe["base_models"]) or "any"


def _sizes(recipe: Record) -> str:
    low, high = recipe["min_parameters"] or 0, recipe["max_parameters"]
    if not high:
        return f"{low / 1e9:g}B and more" if low else "any"
    return f"{low / 1e9:g}B to {high / 1e9:g}B" if low else f"under {high / 1e9:g}B"


JOBS = listing({
    "ID": "id", "STATUS": job_state, "MODEL": "model",
    "FINE-TUNED MODEL": lambda j: j.get("fine_tuned_model"), "CREATED": since("created_at"), "": _where,
})  # fmt: skip
CHECKPOINTS = listing({"ID": "id", "STEP": "step_number", "METRICS": _metrics, "CREATED": since("created_at")})
RECIPES = listing({"RECIPE": "id", "ADAPTER": "adapter", "BASE MODELS": _models, "PARAMETERS": _sizes, "": "summary"})


def register(app: typer.Typer) -> None:
    def state(job: Mapping[str, Any]) -> str:
        return f"job {job['id']} is {job_state(job)}"

    add_commands(app, "Jobs", {
        "jobs": jobs,
        "job": job,
        "logs": logs,
        "metrics": metrics,
        "checkpoints": remote.call("jobs.checkpoints", "List a job's checkpoints, newest first; `ft submit --warm-start` accepts them.",
            CHECKPOINTS, job_id=JobId),
        "cancel": remote.call("jobs.cancel", "Cancel a job; its last checkpoint stays.", state, job_id=JobId),
        "pause": remote.call("jobs.pause", "Pause a job: it saves a checkpoint and releases its GPUs.", state, job_id=JobId),
        "resume": remote.call("jobs.resume", "Queue a paused job again; it resumes from its checkpoint.", state, job_id=JobId),
        "queue": queue,
    })  # fmt: skip
    add_group(app, "recipes", "Recipes: the defaults of jobs, each with its source.", {
        "list": remote.call("recipes.list", "List the recipes and the models they are for.", RECIPES),
        "show": remote.call("recipes.retrieve", "Show every default of a recipe with its source.", _show_recipe,
            name=argument("Recipe, with or without its version (`ft recipes list`)."), method=(RecipeMethod, "sft")),
    }, panel="Jobs")  # fmt: skip


@remote(JOBS)
def jobs(
    client: FtClient,
    limit: Limit = 20,
    status: Annotated[
        str | None, typer.Option("--status", help="Only jobs with this status: queued, running, evaluating, succeeded, failed, ...")
    ] = None,
) -> Any:
    """List jobs, newest first."""
    from ft_client.resources.jobs import STATES

    state, word = (status, None) if status in STATES else (None, status)  # the column shows the state; OpenAI's words are taken too
    return client.jobs.list(limit=limit, state=state, status=word).take(limit)


def job(
    job_id: JobId,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Follow it until it has ended.")] = False,
    as_json: Json = False,
) -> None:
    """Show a job, or follow it to its end (exit code 0 succeeded, 1 failed, 3 cancelled)."""
    with connect() as client:
        if wait:
            wait_for(client, job_id, as_json=as_json)
            return
        found = client.jobs.retrieve(job_id)
    show(found, show_job, as_json=as_json)


def wait_for(client: FtClient, job_id: str, *, as_json: bool) -> None:
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
                at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["created_at"]))
                print(f"{at}  {event['level']:<5} {in_commands(event['message'])}", flush=True)


def log_lines(pieces: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a text that comes in pieces, each once it is complete, without its line end."""
    rest = ""
    for piece in pieces:
        *complete, rest = (rest + piece).split("\n")
        yield from complete
    if rest:
        yield rest


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
            show({"file": str(file)}, lambda found: print(found["file"]), as_json=as_json)
        elif as_json:
            print_json(client.jobs.metrics(job_id)["data"])
        else:
            print(client.jobs.metrics_csv(job_id).decode(), end="")


def _show_recipe(found: Record) -> None:
    named = {"recipe": found["id"], "method": found["method"], "adapter": found["adapter"]}
    fields({**named, "base models": _models(found), "for": found["summary"]})
    table(("DEFAULT", "VALUE", "SOURCE"), [(name, str(d["value"]), d["source"]) for name, d in found["defaults"].items()])


def queue(watch: Watch = False, as_json: Json = False) -> None:
    """Show your waiting jobs with position, reason, expected start and jobs ahead; your running jobs; and free GPUs."""
    with connect() as client:
        if watch and not as_json:
            show_repeatedly(lambda: queue_lines(client.queue.retrieve(), now=time.time()))
            return
        found = client.queue.retrieve()
    show(found, lambda found: print("\n".join(queue_lines(found, now=time.time()))), as_json=as_json)


def queue_lines(found: Mapping[str, Any], *, now: float) -> list[str]:
    """Format a tenant's queue."""
    lines = []
    for job in found["waiting"]:
        lines.append(f"{job['id']}  {job['model']}, {counted(job['num_gpus'], 'GPU')}, {job['tier']}")
        lines.append(f"  {waiting_line(job, now=now, length=found['length'], clock=lambda at: wall_clock(at, now))}")
        if job["reason_detail"] and job["reason_detail"] not in lines[-1]:
            lines.append(f"  {job['reason_detail']}")
        lines.append(f"  {_waited(job, now)}")
    for job in found["waiting_evaluations"]:
        why = job["reason_detail"] or job["reason"]
        lines.append(f"{job['id']}  {job['model']}, {counted(job['num_gpus'], 'GPU')}, {job['tier']}")
        lines.append(f"  Evaluating: waits for GPUs, before new trainings of its tier{f' · {why}' if why else ''}")
    if lines:
        lines.append("")
    lines += [line for job in found["running"] for line in (f"{job['id']}  {job['model']}", f"  {running_line(job, now=now)}")]
    if found["running"]:
        lines.append("")
    if num := found["preparing"]:
        are, their = ("is", "its data is") if num == 1 else ("are", "their data is")
        lines.append(f"{counted(num, 'job')} of yours {are} not in the queue yet: {their} being prepared")
    if not found["waiting"] and not found["waiting_evaluations"]:
        lines.append("No job of yours is waiting for GPUs.")
    kinds = by_tier_words(found["by_tier"])
    lines.append(f"The queue: {counted(found['length'], 'job')}{f' ({kinds})' if kinds else ''} of all tenants")
    return lines + [f"Pool {pool_line(p)}" for p in found["pools"]]


def running_line(job: Mapping[str, Any], *, now: float) -> str:
    """Format a job that holds GPUs in one line."""
    done = evaluation_line(job["evaluation"])
    steps = f" · step {job['step'] or 0}/{job['total_steps']}" if job["total_steps"] else f" · {done}" if done else ""
    gpus, since = counted(job["num_gpus"], "GPU"), span_words(now - job["since"])
    where = f"{held_for(job).capitalize()} on {gpus} of pool {job['pool']} for {since}"
    if job["stopping"]:
        return f"{where}{steps} · saving a checkpoint to make room for another job; it resumes automatically without losing work"
    end = job["estimated_end"]
    if end is None or (job["evaluation"] or {}).get("eta_s"):
        return where + steps
    left = f"ends about {wall_clock(end, now)} (in {span_words(end - now)})" if end > now else "takes longer than expected"
    return f"{where}{steps} · {left}"


def pool_line(pool: Mapping[str, Any]) -> str:
    """Format a pool's GPUs in one line."""
    kept = f", {pool['reserved_gpus']} reserved for premium" if pool["reserved_gpus"] else ""
    spot = ", spot" if pool["pricing"] == "spot" else ""
    block = f", at most {pool['largest_free']} of them on one node" if pool["free_gpus"] > pool["largest_free"] else ""
    return f"{pool['name']} ({pool['gpu_type']}{spot}): {pool['free_gpus']} of {pool['num_gpus']} GPUs free{block}{kept}"


def _waited(job: Mapping[str, Any], now: float) -> str:
    message = [f"has waited {span_words(job['waited_s'])}"]
    if job["due_at"] is not None:
        due = wall_clock(job["due_at"], now)
        message.append(f"{f'since {due}' if job['due_at'] <= now else f'from {due} on'}, later jobs of its tier cannot pass it")
    if job["preemptions"]:
        message.append(f"made room for others {counted(job['preemptions'], 'time')}")
    return " · ".join(message)


def show_repeatedly(look: Callable[[], list[str]]) -> None:
    """Refresh in place on a terminal, otherwise print one version after another."""
    if not sys.stdout.isatty():
        while True:
            print("\n".join([*look(), "", "-" * 40]), flush=True)
            time.sleep(EVERY_S)
    from rich.live import Live

    with Live(console=console(), auto_refresh=False, screen=True) as live:
        while True:
            live.update(escape("\n".join(look())), refresh=True)
            time.sleep(EVERY_S)
