"""``ft admin queue``, ``nodes``, ``maintenance``, ``kueue`` and ``pool-manifest``: the queue, the nodes, and the manifests of a cluster."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.cli.local_platform import local, open_local, user
from core.epoch_time import span_words
from ft_client.cli.command_options import span_s
from ft_client.cli.commands import add_commands, add_group, argument, documents, listing, option, show, since
from ft_client.cli.job_commands import Watch, pool_line, show_repeatedly
from ft_client.cli.job_progress import wall_clock
from ft_client.cli.output import Exit, Json, counted, print_json, print_manifests, say
from ft_client.queue_messages import by_tier_words, held_for

if TYPE_CHECKING:
    from control_plane.platform.context import Platform

NodeName = argument("Node, as in `ft admin nodes list`.", metavar="NODE")
Pool = option("--pool", "Only this pool.")
Tenant = option("--tenant", "Only this tenant.")
NODE = "name pool gpu_type fabric num_gpus used_gpus num_jobs state drained_at drained_by reason"
MAINTENANCE = "scope message started_by started_at stop_at"


def _stops(done: Mapping[str, Any]) -> str:
    at = done["stop_at"]
    return "running jobs finish" if at is None else f"by {wall_clock(at, time.time())}, running jobs save a checkpoint and stop"


NODES = listing({
    "NODE": "name", "POOL": "pool", "GPUS": lambda n: f"{n['num_gpus']} x {n['gpu_type']}", "USED": "used_gpus", "JOBS": "num_jobs",
    "FABRIC": "fabric", "STATE": "state", "SINCE": since("drained_at"), "WHY": "reason",
})  # fmt: skip
SCOPES = listing({"SCOPE": "scope", "SINCE": since("started_at"), "BY": "started_by", "RUNNING JOBS": _stops, "MESSAGE": "message"})


def register(admin: typer.Typer) -> None:
    add_commands(admin, None, {"queue": whole_queue, "kueue": kueue, "pool-manifest": pool_manifest})
    add_group(admin, "nodes", "Nodes of the pools: list, drain and undrain them.", {
        "list": local.call("control_plane.capacity.nodes.list_nodes",
            "List every node with the GPUs held there and whether it is drained.", NODES, shows=NODE),
        "drain": local.call("control_plane.capacity.nodes.drain", "Place nothing new on a node; what runs there continues to its end.",
            _drained, shows=NODE, fixed={"by": user}, name=NodeName,
            reason=(option("--reason", "Note for other operators.", type=str), "drained by an operator")),
        "undrain": local.call("control_plane.capacity.nodes.undrain", "Allow new jobs on a node again.",
            "node {name} of pool {pool} takes jobs again", shows=NODE, name=NodeName),
    })  # fmt: skip
    add_group(admin, "maintenance", "Start no jobs on the platform, in a pool or of a tenant.", {
        "start": local.call("control_plane.capacity.maintenance.start",
            "Start no more jobs; running jobs finish, or save a checkpoint by a given time. Again: change message and time.",
            lambda done: f"maintenance of {done['scope']}: no job starts; {_stops(done)}. End it: ft admin maintenance end",
            shows=MAINTENANCE, fixed={"by": user}, message=option("--message", "Message that waiting jobs show.", type=str), pool=Pool,
            tenant=Tenant, stop_in_s=option("--stop-in", "When no job runs any more: 90min, 2h. By default, running jobs finish.",
                metavar="SPAN", parser=span_s, type=int | None)),
        "end": local.call("control_plane.capacity.maintenance.end", "Start jobs again.",
            "maintenance of {scope} has ended: jobs start again", shows=MAINTENANCE, pool=Pool, tenant=Tenant),
        "list": local.call(_maintenance, "List what is under maintenance.", SCOPES),
    })  # fmt: skip


def _drained(done: Mapping[str, Any]) -> str:
    running = f"{done['num_jobs']} jobs still run there on {done['used_gpus']} GPUs"
    left = running if done["num_jobs"] else "no job runs there; the node can be removed"
    what = f"node {done['name']} of pool {done['pool']} is {done['state']}: no new jobs are placed on it"
    return f"{what}; {left}. Take it back: ft admin nodes undrain"


def _maintenance(platform: Platform) -> Any:
    from control_plane.capacity import maintenance

    with platform.engine.connect() as conn:
        return documents(maintenance.list_all(conn), *MAINTENANCE.split())


def kueue(
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Write queues.yaml, tenants.yaml and nodes.sh there.")] = None,
    check: Annotated[
        Path | None,
        typer.Option("--check", metavar="FILE", help="Output of `kubectl get clusterqueues -o yaml`; -: stdin. Exit code 1 if they differ"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Render Kueue's objects for the pools and tenants, or check a cluster's queues against the GPUs that are ready.

    Without options, writes to stdout, for `kubectl apply --server-side -f -`.
    """
    from control_plane.capacity import kueue

    if check is not None and str(check) != "-" and not check.is_file():
        raise typer.BadParameter(f"--check {check} is not a file; it is the output of `kubectl get clusterqueues -o yaml`")
    with open_local() as platform:
        if check is not None:
            text = sys.stdin.read() if str(check) == "-" else check.read_text(encoding="utf-8")
            _compared(kueue.check(platform, text), as_json)
            return
        files = kueue.files(platform)
        if out is None:
            print_manifests("---\n".join(text for name, text in files.items() if name.endswith(".yaml")), as_json=as_json)
            return
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (out / name).write_text(text, encoding="utf-8")
    if as_json:
        print_json({"files": [str(out / name) for name in files]})
    say(f"wrote {', '.join(files)} to {out}: sh nodes.sh, then kubectl apply --server-side -f queues.yaml -f tenants.yaml")


def _compared(differences: list[str], as_json: bool) -> None:
    if as_json:
        print_json({"agrees": not differences, "differences": differences})
    else:
        for line in differences:
            print(line)
    if differences:
        raise typer.Exit(Exit.FAILED)
    say("the cluster's quotas match the ready and drained GPUs, and Kueue's own preemption is off")


def pool_manifest(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A base model of the catalogue.")],
    replicas: Annotated[int, typer.Option(min=1, help="Servers.")] = 2,
    max_loras: Annotated[int, typer.Option(min=1, help="Adapters in one batch.")] = 8,
    max_cpu_loras: Annotated[int, typer.Option(min=1, help="Adapters in a server's memory; at least as many as are loaded.")] = 256,
    as_json: Json = False,
) -> None:
    """Render the Kubernetes manifests of a base model's servers: StatefulSet with its Service, NetworkPolicy, InferencePool.

    Comments at the top give the platform's FT_INFERENCE_URLS and FT_SERVED_ADAPTERS_DIR.
    """
    from control_plane.adapters import manifests

    with open_local() as platform:
        made = manifests.pool(platform, model, replicas=replicas, max_loras=max_loras, max_cpu_loras=max_cpu_loras)
    print_manifests(made, as_json=as_json)


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
        gpus = f"{counted(late['num_gpus'], 'GPU')} of pool {late['pool']}"
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
        f"; {counted(pool['unusable_gpus'], 'GPU')} fragmented: the widest waiting job could use them together"
        if pool["unusable_gpus"]
        else ""
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
