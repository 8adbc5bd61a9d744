"""``ft queue`` and ``ft admin queue``: why jobs wait, when they start, what is ahead, and what runs where."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from control_plane.cli.output import Json, console, escape, print_json, say
from control_plane.cli.tenant.job_progress import wall_clock
from control_plane.platform.epoch_time import span_words
from control_plane.queue.status.messages import by_tier_words, waiting_line

EVERY_S = 2.0
"""Seconds between polls of the queue: scheduling cycles come every second or two."""

Watch = Annotated[bool, typer.Option("--watch", "-w", help="Refresh every two seconds until interrupted.")]


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Jobs")(queue)


def register_admin(admin: typer.Typer) -> None:
    admin.command("queue")(whole_queue)


def queue(watch: Watch = False, as_json: Json = False) -> None:
    """Show your waiting jobs with position, reason, expected start and jobs ahead; your running jobs; and free GPUs."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        if watch and not as_json:
            _watch(lambda: queue_lines(client.request("GET", "/v1/queue"), now=time.time()))
            return
        found = client.request("GET", "/v1/queue")
    if as_json:
        print_json(found)
    else:
        print("\n".join(queue_lines(found, now=time.time())))


def whole_queue(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="Waiting jobs to list.")] = 50,
    nodes: Annotated[bool, typer.Option("--nodes", help="Each node with what runs on it.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write it as a page with a timeline of the nodes.")] = None,
    watch: Watch = False,
    as_json: Json = False,
) -> None:
    """Show the queue of all tenants: waiting jobs and reasons, reservations, running jobs, pools, recent use, scheduler counters."""
    from control_plane.cli.admin.local_platform import open_local
    from control_plane.queue.status import responses, view

    with open_local() as platform:

        def look() -> Mapping[str, Any]:
            return responses.whole_queue(view.of_all(platform, limit=limit))

        if watch and not as_json and html is None:
            _watch(lambda: whole_lines(look(), now=time.time(), nodes=nodes))
            return
        found = look()
        if html is not None:
            from control_plane.console.queue_page import queue_page

            html.write_text(queue_page(found, now=time.time()))
            say(f"wrote {html}")
            return
    if as_json:
        print_json(found)
    else:
        print("\n".join(whole_lines(found, now=time.time(), nodes=nodes)))


def queue_lines(found: Mapping[str, Any], *, now: float) -> list[str]:
    """Format a tenant's queue."""
    lines = []
    for job in found["waiting"]:
        lines.append(f"{job['id']}  {job['model']}, {_gpus(job['num_gpus'])}, {job['tier']}")
        lines.append(f"  {waiting_line(job, now=now, length=found['length'], clock=lambda at: wall_clock(at, now))}")
        if job["reason_detail"] and job["reason_detail"] not in lines[-1]:
            lines.append(f"  {job['reason_detail']}")
        lines.append(f"  {_waited(job, now)}")
    if found["waiting"]:
        lines.append("")
    lines += [line for job in found["running"] for line in (f"{job['id']}  {job['model']}", f"  {running_line(job, now=now)}")]
    if found["running"]:
        lines.append("")
    if found["preparing"]:
        lines.append(f"{_count(found['preparing'], 'job')} of yours is not in the queue yet: its data is being prepared".replace(
            "jobs of yours is not in the queue yet: its data is", "jobs of yours are not in the queue yet: their data is"
        ))  # fmt: skip
    if not found["waiting"]:
        lines.append("None of your jobs are waiting for GPUs.")
    kinds = by_tier_words(found["by_tier"])
    lines.append(f"The queue: {_count(found['length'], 'job')}{f' ({kinds})' if kinds else ''} of all tenants")
    lines += [f"Pool {pool_line(p)}" for p in found["pools"]]
    return lines


def running_line(job: Mapping[str, Any], *, now: float) -> str:
    """Format a job that holds GPUs in one line."""
    steps = f" · step {job['step'] or 0}/{job['total_steps']}" if job["total_steps"] else ""
    where = f"{str(job['state']).capitalize()} on {_gpus(job['num_gpus'])} of pool {job['pool']} for {span_words(now - job['since'])}"
    if job["stopping"]:
        return f"{where}{steps} · being preempted: saves a checkpoint and resumes automatically without losing work"
    end = job["estimated_end"]
    if end is None:
        return where + steps
    left = f"ends about {wall_clock(end, now)} (in {span_words(end - now)})" if end > now else "takes longer than expected"
    return f"{where}{steps} · {left}"


def pool_line(pool: Mapping[str, Any]) -> str:
    """Format a pool's GPUs in one line."""
    kept = f", {pool['reserved_gpus']} reserved for premium" if pool["reserved_gpus"] else ""
    spot = ", spot" if pool["pricing"] == "spot" else ""
    block = f", at most {pool['largest_free']} of them on one node" if pool["free_gpus"] > pool["largest_free"] else ""
    return f"{pool['name']} ({pool['gpu_type']}{spot}): {pool['free_gpus']} of {pool['num_gpus']} GPUs free{block}{kept}"


def whole_lines(found: Mapping[str, Any], *, now: float, nodes: bool) -> list[str]:
    """Format the operators' queue."""
    lines = [_rounds(found, now), *(f"Pool {pool_line(p)}{_apart(p)}" for p in found["pools"]), ""]
    if nodes:
        lines += _rows(("NODE", "POOL", "FREE", "JOBS", ""), [_node(n, p) for p in found["pools"] for n in p["nodes"]])
    if found["waiting"]:
        heading = ("POS", "JOB", "TENANT", "TIER", "GPUS", "WAITED", "STARTS", "REASON", "DETAIL")
        lines += _rows(heading, [_waiting_row(j, now) for j in found["waiting"]])
        if found["length"] > len(found["waiting"]):
            lines[-1:] = [f"... and {found['length'] - len(found['waiting'])} more (--limit)", ""]
    if found["running"]:
        lines += _rows(("JOB", "TENANT", "TIER", "GPUS", "ON", "FOR", "ENDS", "STATE"), [_running_row(j, now) for j in found["running"]])
    if found["tenants"]:
        shares = [
            (t["tenant"], str(t["waiting"]), str(t["running"]), str(t["num_gpus"]), f"{t['used_gpu_hours']:.4g}") for t in found["tenants"]
        ]
        lines += _rows(("TENANT", "WAITING", "RUNNING", "GPUS", "RECENT GPU-HOURS"), shares)
    for late in found["overdue"]:
        what = "has no workload" if late["kind"] == "start" else "was asked to stop and still holds its GPUs"
        gpus = f"{_gpus(late['num_gpus'])} of pool {late['pool']}"
        lines.append(f"OVERDUE: attempt {late['attempt']} of {late['job_id']} ({gpus}) {what} after {span_words(late['age_s'])}")
    return lines


def _waited(job: Mapping[str, Any], now: float) -> str:
    said = [f"has waited {span_words(job['waited_s'])}"]
    if job["due_at"] is not None:
        over = f"since {wall_clock(job['due_at'], now)}" if job["due_at"] <= now else f"from {wall_clock(job['due_at'], now)} on"
        said.append(f"{over} no later job of its tier overtakes it")
    if job["preemptions"]:
        said.append(f"preempted {_count(job['preemptions'], 'time')}")
    return " · ".join(said)


def _rounds(found: Mapping[str, Any], now: float) -> str:
    s = found["scheduler"]
    kinds = by_tier_words(found["by_tier"])
    waits = f"{_count(found['length'], 'job')} {'waits' if found['length'] == 1 else 'wait'}{f' ({kinds})' if kinds else ''}"
    if s["last_round_at"] is None:
        return f"{waits}; no scheduling cycle has run yet"
    took = "" if s["last_round_s"] is None else f", took {s['last_round_s'] * 1000:.0f} ms"
    counts = f"{s['starts']} starts, {s['backfills']} of them backfill; {s['preemptions']} preemptions; {s['reservations']} reservations"
    return f"{waits}; last cycle {max(0.0, now - s['last_round_at']):.0f} s ago{took}; {counts}, {s['slipped']} slipped"


def _apart(pool: Mapping[str, Any]) -> str:
    return f"; {_gpus(pool['unusable_gpus'])} too scattered for the widest waiting job" if pool["unusable_gpus"] else ""


def _node(node: Mapping[str, Any], pool: Mapping[str, Any]) -> Sequence[str]:
    runs = ", ".join(f"{job} ({gpus})" for job, gpus in node["jobs"].items())
    news = [] if node["ready"] else ["not ready"]
    news += [f"reserved for {job}" for job in node["reserved_for"]]
    return node["name"], pool["name"], f"{node['free_gpus']}/{node['num_gpus']}", runs, "; ".join(news)


def _waiting_row(job: Mapping[str, Any], now: float) -> Sequence[str]:
    kept = job["reservation"]
    start = kept["start"] if kept else job["estimated_start"]
    starts = "" if start is None else f"{wall_clock(start, now)}{' reserved' if kept else ''}"
    position = "" if job["position"] is None else str(job["position"])
    waited = span_words(job["waited_s"]) + (" due" if job["due_at"] is not None and job["due_at"] <= now else "")
    reason, detail = job["reason"] or "New", job["reason_detail"] or ""
    return position, job["id"], job["tenant"], job["tier"], str(job["num_gpus"]), waited, starts, reason, detail


def _running_row(job: Mapping[str, Any], now: float) -> Sequence[str]:
    nodes = ", ".join(f"{node} ({gpus})" for node, gpus in job["placement"])
    end = job["estimated_end"]
    ends = "" if end is None else wall_clock(end, now) if end > now else f"overdue {span_words(job['overrun_s'])}"
    state = f"stops for {job['stopped_for'] or 'another job'}" if job["stopping"] else job["state"]
    gpus, since = str(job["num_gpus"]), span_words(now - job["since"])
    return job["id"], job["tenant"], job["tier"], gpus, nodes or job["pool"], since, ends, state


def _rows(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Format columns as wide as necessary, followed by an empty line."""
    widths = [max(len(r[i]) for r in [heading, *rows]) for i in range(len(heading))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in [heading, *rows]] + [""]


def _watch(look: Callable[[], list[str]]) -> None:
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


def _gpus(number: int) -> str:
    return _count(number, "GPU")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
