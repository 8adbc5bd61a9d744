"""``ft admin queue``: the queue of all tenants, what runs on each node, and the scheduler's counters."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from control_plane.cli.local_platform import open_local
from core.epoch_time import span_words
from ft_client.cli.job_progress import wall_clock
from ft_client.cli.jobs.queue_commands import Watch, counted, gpu_count, pool_line, show_repeatedly
from ft_client.cli.output import Json, say
from ft_client.cli.record_views import show
from ft_client.queue_messages import by_tier_words, held_for


def register(admin: typer.Typer) -> None:
    admin.command("queue")(whole_queue)


def whole_queue(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="Waiting jobs to list.")] = 50,
    nodes: Annotated[bool, typer.Option("--nodes", help="Each node with what runs on it.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write it as a page with a timeline of the nodes.")] = None,
    watch: Watch = False,
    as_json: Json = False,
) -> None:
    """Show the queue of all tenants: waiting jobs and reasons, reservations, running jobs, pools, recent use, scheduler counters."""
    from control_plane.queue.status import view

    with open_local() as platform:

        def look() -> Mapping[str, Any]:
            return view.of_all(platform, limit=limit).model_dump()

        if watch and not as_json and html is None:
            show_repeatedly(lambda: whole_lines(look(), now=time.time(), nodes=nodes))
            return
        found = look()
        if html is not None:
            from control_plane.console.documents.queue_page import queue_page

            html.write_text(queue_page(found, now=time.time()))
            say(f"the queue is in {html}")
    if as_json or html is None:
        show(found, lambda found: print("\n".join(whole_lines(found, now=time.time(), nodes=nodes))), as_json=as_json)


def whole_lines(found: Mapping[str, Any], *, now: float, nodes: bool) -> list[str]:
    """Format the operators' queue."""
    lines = [_rounds(found, now), *(f"Pool {pool_line(p)}{_apart(p)}" for p in found["pools"]), ""]
    if nodes:
        lines += columns(("NODE", "POOL", "FREE", "JOBS", ""), [_node(n, p) for p in found["pools"] for n in p["nodes"]])
    if found["waiting"]:
        heading = ("POS", "JOB", "TENANT", "TIER", "GPUS", "WAITED", "STARTS", "REASON", "DETAIL")
        lines += columns(heading, [_waiting_row(j, now) for j in found["waiting"]])
        if found["length"] > len(found["waiting"]):
            lines[-1:] = [f"... and {found['length'] - len(found['waiting'])} more (--limit)", ""]
    if found["running"]:
        lines += columns(("JOB", "TENANT", "TIER", "GPUS", "ON", "FOR", "ENDS", "STATE"), [_running_row(j, now) for j in found["running"]])
    if found["tenants"]:
        shares = [
            (t["tenant"], str(t["waiting"]), str(t["running"]), str(t["num_gpus"]), f"{t['used_gpu_hours']:.4g}") for t in found["tenants"]
        ]
        lines += columns(("TENANT", "WAITING", "RUNNING", "GPUS", "LATELY USED GPU-HOURS"), shares)
    for late in found["overdue"]:
        what = "has no workload" if late["kind"] == "start" else "was asked to stop and still holds its GPUs"
        gpus = f"{gpu_count(late['num_gpus'])} of pool {late['pool']}"
        lines.append(f"OVERDUE: attempt {late['attempt']} of {late['job_id']} ({gpus}) {what} after {span_words(late['age_s'])}")
    return lines


def _rounds(found: Mapping[str, Any], now: float) -> str:
    s = found["scheduler"]
    kinds = by_tier_words(found["by_tier"])
    waits = f"{counted(found['length'], 'job')} {'waits' if found['length'] == 1 else 'wait'}{f' ({kinds})' if kinds else ''}"
    if s["last_round_at"] is None:
        return f"{waits}; no scheduling cycle has run yet"
    took = "" if s["last_round_s"] is None else f", took {s['last_round_s'] * 1000:.0f} ms"
    counts = f"{s['starts']} starts, {s['backfills']} of them backfill; {s['preemptions']} preemptions; {s['reservations']} reservations"
    return f"{waits}; last round {max(0.0, now - s['last_round_at']):.0f} s ago{took}; {counts}, {s['slipped']} slipped"


def _apart(pool: Mapping[str, Any]) -> str:
    return (
        f"; {gpu_count(pool['unusable_gpus'])} fragmented: the widest waiting job could use them together" if pool["unusable_gpus"] else ""
    )


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
    state = f"stops for {job['stopped_for'] or 'another job'}" if job["stopping"] else held_for(job)
    gpus, since = str(job["num_gpus"]), span_words(now - job["since"])
    return job["id"], job["tenant"], job["tier"], gpus, nodes or job["pool"], since, ends, state


def columns(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Format columns as wide as necessary, followed by an empty line."""
    widths = [max(len(r[i]) for r in [heading, *rows]) for i in range(len(heading))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in [heading, *rows]] + [""]
