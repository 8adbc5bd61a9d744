"""The operators' queue as one self-contained page: pools, a timeline of their nodes, waiting jobs and their reasons."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from control_plane.console.jinja_environment import document
from core.epoch_time import span_words
from ft_client.queue_messages import ahead_words, by_tier_words, evaluation_line, held_for, waits_for

WIDTH, ROW, TOP, LEFT = 1080, 26, 22, 150
"""Timeline sizes in pixels: its width, a node's height, room for the hours above and names at the left."""
SHORTEST_S, LONGEST_S = 3600.0, 3 * 86400.0
"""Shortest and longest time span of a timeline; what ends later runs out of the picture."""
MAX_NODES = 128
"""Nodes drawn per pool; nodes without jobs are left out first."""
STEPS_S = (600.0, 1800.0, 3600.0, 3 * 3600.0, 6 * 3600.0, 12 * 3600.0, 86400.0)
MAX_TICKS = 9
MAX_LABEL = 15
"""Characters of a node's name beside its bars."""
QUEUE_WORDS = {
    "ahead": ahead_words, "by_tier": by_tier_words, "evaluation_line": evaluation_line, "held_for": held_for, "waits_for": waits_for,
}  # fmt: skip
"""How templates word the queue."""
STOPS_IN_S = 60.0
"""A job that was asked to stop is drawn until then: the policy's handshake."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One job on one node: `lane` of its GPUs from above, both times in seconds from now."""

    job: str
    label: str
    title: str
    kind: str
    """The job's tier, plus ``reserved`` if it has not started."""
    x: float
    width: float
    y: float
    height: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    name: str
    label: str
    """The name, as long as there is room for it."""
    note: str
    y: float
    bars: Sequence[Bar]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    rows: Sequence[Row]
    ticks: Sequence[tuple[float, str, float]]
    """Place, hour on the server's clock, and Unix time."""
    hidden: int
    height: float


def queue_page(found: Mapping[str, Any], *, now: float) -> str:
    """Render the operators' view of the queue as one self-contained page."""
    return document(
        "queue",
        title=f"Queue: {found['length']} waiting, {len(found['running'])} running",
        q=found,
        now=now,
        **timelines(found, now=now),
        **QUEUE_WORDS,
    )


def timelines(found: Mapping[str, Any], *, now: float) -> Mapping[str, Any]:
    """Return what ``documents/timeline.html`` draws: each pool with its timeline."""
    names = {j["id"]: j for j in [*found["running"], *found["waiting"]]}
    drawn = [(pool, timeline(pool, found, names, now=now)) for pool in found["pools"]]
    return {"timelines": drawn, "width": WIDTH, "left": LEFT, "row_height": ROW - 4}


def timeline(pool: Mapping[str, Any], found: Mapping[str, Any], jobs: Mapping[str, Mapping[str, Any]], *, now: float) -> Timeline:
    """Return what each node of a pool does from now on: running jobs to their expected end, then reservations."""
    reserved = [j for j in found["waiting"] if j["reservation"] and j["reservation"]["pool"] == pool["name"]]
    ends = [_left(j, now) for j in found["running"] if j["pool"] == pool["name"]]
    ends += [j["reservation"]["start"] - now + (j["expected_s"] or 0) for j in reserved]
    span = min(LONGEST_S, max([SHORTEST_S, *(e * 1.05 for e in ends)]))
    shown = sorted(pool["nodes"], key=lambda n: not (n["jobs"] or n["reserved_for"]))[:MAX_NODES]
    kept = {n["name"] for n in shown}
    rows = []
    for i, node in enumerate(n for n in pool["nodes"] if n["name"] in kept):
        y = TOP + i * ROW
        bars = [*_running(node, jobs, y, span, now), *_reserved(node, reserved, jobs, y, span, now)]
        note = _note(node)
        rows.append(Row(name=node["name"], label=_shortened(node["name"]), note=note, y=y, bars=bars))
    return Timeline(rows=rows, ticks=_ticks(span, now), hidden=len(pool["nodes"]) - len(rows), height=TOP + len(rows) * ROW + 4)


def _shortened(name: str) -> str:
    return name if len(name) <= MAX_LABEL else f"{name[: MAX_LABEL - 1]}…"


def _note(node: Mapping[str, Any]) -> str:
    if not node["ready"]:
        return "not ready"
    if node["free_gpus"]:
        return f"{node['free_gpus']} free"
    return "full" if sum(node["jobs"].values()) >= node["num_gpus"] else "taken"


def _left(job: Mapping[str, Any], now: float) -> float:
    left = max(0.0, (job["estimated_end"] or now) - now)
    return min(left, STOPS_IN_S) if job["stopping"] else left


def _running(node: Mapping[str, Any], jobs: Mapping[str, Mapping[str, Any]], y: float, span: float, now: float) -> list[Bar]:
    bars, lane = [], 0
    for job_id, gpus in node["jobs"].items():
        job = jobs[job_id]
        left = _left(job, now)
        states = {"stopping": job["stopping"], "over": job["overrun_s"] > 0, "backfill": job["backfill"]}
        kind = " ".join([job["tier"], *(state for state, holds in states.items() if holds)])
        until = "makes room" if job["stopping"] else f"ends in {span_words(left)}" if left else "takes longer than expected"
        filled = ", backfill" if job["backfill"] else ""
        title = f"{job_id} of {job['tenant']}: {gpus} of {job['num_gpus']} GPUs here, {job['tier']}{filled}, {until}"
        bars.append(_bar(job, kind, title, (0.0, left), (lane, gpus, node["num_gpus"]), y, span))
        lane += gpus
    return bars


def _reserved(
    node: Mapping[str, Any], waiting: Sequence[Mapping[str, Any]], jobs: Mapping[str, Mapping[str, Any]], y: float, span: float, now: float
) -> list[Bar]:
    """Fill from below, each where nothing else is drawn at its time."""
    bars: list[Bar] = []
    drawn: list[tuple[float, float, int, int]] = []
    """Time span and the node's GPUs."""
    lane = 0
    for job_id, gpus in node["jobs"].items():
        drawn.append((0.0, _left(jobs[job_id], now), lane, lane + gpus))
        lane += gpus
    for job in sorted(waiting, key=lambda j: (j["reservation"]["start"], j["position"] or 0)):
        gpus = dict(job["reservation"]["placement"]).get(node["name"], 0)
        if gpus:
            start = max(0.0, job["reservation"]["start"] - now)
            title = f"{job['id']} of {job['tenant']} has {gpus} GPUs here from in {span_words(start)} on, for {job['num_gpus']} in all"
            end, lowest = start + (job["expected_s"] or 0.0), max(0, node["num_gpus"] - gpus)
            beside = [(first, last) for begin, until, first, last in drawn if begin < end and start < until]
            lane = next((n for n in range(lowest, -1, -1) if all(last <= n or first >= n + gpus for first, last in beside)), lowest)
            drawn.append((start, end, lane, lane + gpus))
            bars.append(_bar(job, f"{job['tier']} reserved", title, (start, end), (lane, gpus, node["num_gpus"]), y, span))
    return bars


def _bar(
    job: Mapping[str, Any], kind: str, title: str, times: tuple[float, float], lanes: tuple[int, int, int], y: float, span: float
) -> Bar:
    """`lanes`: the first of the node's GPUs, how many of them, and of how many."""
    scale = (WIDTH - LEFT) / span
    begin, end = (min(span, t) * scale for t in times)
    first, gpus, of = lanes
    height = (ROW - 4) / max(1, of)
    width = max(3.0, end - begin)
    label = job["tenant"] if width > 8 * len(job["tenant"]) and gpus * height >= 11 else ""
    return Bar(
        job=job["id"], label=label, title=title, kind=kind, x=LEFT + begin, width=width, y=y + 2 + first * height, height=gpus * height
    )  # fmt: skip


def _ticks(span: float, now: float) -> list[tuple[float, str, float]]:
    """Whole hours (or parts, or days) of the reader's clock, few enough to be readable."""
    step = next((s for s in STEPS_S if span / s <= MAX_TICKS), STEPS_S[-1])
    local = now - time.timezone
    first = (local // step + 1) * step - local
    found, at = [], first
    while at < span:
        then = time.localtime(now + at)
        form = "%a %d" if step >= STEPS_S[-1] or (then.tm_hour, then.tm_min) == (0, 0) else "%H:%M"
        found.append((LEFT + at * (WIDTH - LEFT) / span, time.strftime(form, then), now + at))
        at += step
    return found
