"""``ft queue`` and ``ft admin queue``: why jobs wait, when they start, what is ahead, and what runs where."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from core.epoch_time import span_words
from ft_client.cli.job_progress import wall_clock
from ft_client.cli.output import Json, console, escape
from ft_client.cli.record_views import add_commands, show
from ft_client.cli.remote import connect
from ft_client.queue_messages import by_tier_words, evaluation_line, held_for, waiting_line

EVERY_S = 2.0
"""Seconds between polls of the queue: scheduling cycles come every second or two."""
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Refresh every two seconds until interrupted.")]


def register(app: typer.Typer) -> None:
    add_commands(app, "Jobs", queue)


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
        lines.append(f"{job['id']}  {job['model']}, {gpu_count(job['num_gpus'])}, {job['tier']}")
        lines.append(f"  {waiting_line(job, now=now, length=found['length'], clock=lambda at: wall_clock(at, now))}")
        if job["reason_detail"] and job["reason_detail"] not in lines[-1]:
            lines.append(f"  {job['reason_detail']}")
        lines.append(f"  {_waited(job, now)}")
    for job in found["waiting_evaluations"]:
        lines.append(f"{job['id']}  {job['model']}, {gpu_count(job['num_gpus'])}, {job['tier']}")
        lines.append(f"  Evaluating: waits for GPUs, before new trainings of its tier{_because(job)}")
    if lines:
        lines.append("")
    lines += [line for job in found["running"] for line in (f"{job['id']}  {job['model']}", f"  {running_line(job, now=now)}")]
    if found["running"]:
        lines.append("")
    if found["preparing"]:
        lines.append(f"{counted(found['preparing'], 'job')} of yours is not in the queue yet: its data is being prepared".replace(
            "jobs of yours is not in the queue yet: its data is", "jobs of yours are not in the queue yet: their data is"
        ))  # fmt: skip
    if not found["waiting"] and not found["waiting_evaluations"]:
        lines.append("No job of yours is waiting for GPUs.")
    kinds = by_tier_words(found["by_tier"])
    lines.append(f"The queue: {counted(found['length'], 'job')}{f' ({kinds})' if kinds else ''} of all tenants")
    lines += [f"Pool {pool_line(p)}" for p in found["pools"]]
    return lines


def running_line(job: Mapping[str, Any], *, now: float) -> str:
    """Format a job that holds GPUs in one line."""
    done = evaluation_line(job["evaluation"])
    steps = f" · step {job['step'] or 0}/{job['total_steps']}" if job["total_steps"] else f" · {done}" if done else ""
    where = f"{held_for(job).capitalize()} on {gpu_count(job['num_gpus'])} of pool {job['pool']} for {span_words(now - job['since'])}"
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


def _because(job: Mapping[str, Any]) -> str:
    why = job["reason_detail"] or job["reason"]
    return f" · {why}" if why else ""


def _waited(job: Mapping[str, Any], now: float) -> str:
    message = [f"has waited {span_words(job['waited_s'])}"]
    if job["due_at"] is not None:
        due = wall_clock(job["due_at"], now)
        since = f"since {due}" if job["due_at"] <= now else f"from {due} on"
        message.append(f"{since}, later jobs of its tier cannot pass it")
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


def gpu_count(number: int) -> str:
    return counted(number, "GPU")


def counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
