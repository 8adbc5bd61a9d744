"""What must hold after the trial on a real platform, read from its database, its launcher's records and its object store."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from control_plane.attempts.tables import attempts, checkpoints
from control_plane.jobs.tables import job_events, jobs
from control_plane.queue.tables import reservations, scheduler_state

TICK_S = 0.05
"""Clocks of two processes of one machine, and the time between a process's end and the line that says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    engine: sa.Engine
    home: Path
    slots: int
    kills: Sequence[Mapping[str, Any]]
    seen: Sequence[Mapping[str, Any]]
    """Samples of which workloads had a training process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tables:
    jobs: Mapping[str, Any]
    attempts: Sequence[Any]
    """With what their reservations say."""
    events: Sequence[Any]
    finals: Mapping[str, str]
    """By job: prefix of its finished model."""


def examine(e: Evidence) -> dict[str, Any]:
    """Figures of the trial, and every breach in words."""
    t = _read(e.engine)
    given = [(a.granted_at.timestamp(), a.released_at.timestamp(), a) for a in t.attempts if a.released_at is not None]
    processes = list(_processes(e.home))
    same, compared = _results(e, t)
    breaches = [
        *(f"{j.id} ended as {j.state}: {j.error}" for j in t.jobs.values() if j.state != "succeeded"),
        *(f"{a.job_id} a{a.attempt} was never released" for a in t.attempts if a.released_at is None),
        *_overbooked(((b, e_, dict(a.placement)) for b, e_, a in given), what="reserved"),
        *_too_many(((p["started_at"], p["ended_at"]) for p in processes), e.slots, what="training processes by their records"),
        *(f"{len(s['training'])} trainings were seen at once" for s in e.seen if len(s["training"]) > e.slots),
        *_twice(e.seen),
        *_unexplained(t),
        *same,
    ]
    return {
        "jobs": len(t.jobs),
        "by_tier": dict(Counter(j.tier for j in t.jobs.values())),
        "attempts": len(t.attempts),
        "outcomes": dict(Counter(a.outcome for a in t.attempts)),
        "kills": dict(Counter(k["kind"] for k in e.kills)),
        "preemptions": sum(a.outcome == "preempted" for a in t.attempts),
        "preempted_for": dict(Counter(t.jobs[a.preempted_for].tier for a in t.attempts if a.preempted_for in t.jobs)),
        "handshake_s": _spread(
            [(a.released_at - a.stop_asked_at).total_seconds() for a in t.attempts if a.stop_asked_at and a.released_at]
        ),
        "lost_gpu_s_by_preemption": round(sum(a.lost_s or 0.0 for a in t.attempts if a.outcome == "preempted"), 3),
        "lost_gpu_s": round(sum(a.lost_s or 0.0 for a in t.attempts), 3),
        "started_because": dict(_reasons(t)),
        "wait_s_by_tier": {tier: _spread(waits) for tier, waits in _waits(t).items()},
        "submit_to_provisioning_s_with_a_free_slot": _spread(_prompt(t, e.slots, {j.id: j.created_at for j in t.jobs.values()})),
        "packed_to_provisioning_s_with_a_free_slot": _spread(_prompt(t, e.slots, _first_queued(t))),
        "most_trainings_seen_at_once": max((len(s["training"]) for s in e.seen), default=0),
        "samples": len(e.seen),
        "results_compared": compared,
        "rounds": _state(e.engine),
        "breaches": breaches,
    }


def _read(engine: sa.Engine) -> Tables:
    same = (reservations.c.job_id == attempts.c.job_id) & (reservations.c.attempt == attempts.c.attempt)
    held = ("granted_at", "released_at", "placement", "num_gpus", "backfill", "stop_asked_at", "preempted_for")
    with engine.connect() as conn:
        all_jobs = {r.id: r for r in conn.execute(sa.select(jobs))}
        query = sa.select(attempts, *(reservations.c[name] for name in held)).join(reservations, same).order_by(reservations.c.granted_at)
        events = sa.select(job_events).where(job_events.c.type == "message").order_by(job_events.c.seq)
        finals = sa.select(checkpoints.c.job_id, checkpoints.c.object_prefix).where(checkpoints.c.final)
        return Tables(
            jobs=all_jobs, attempts=conn.execute(query).all(), events=conn.execute(events).all(),
            finals={r.job_id: r.object_prefix for r in conn.execute(finals)},
        )  # fmt: skip


def _processes(home: Path) -> Iterator[dict[str, Any]]:
    for path in sorted((home / "work" / "launcher").glob("*-a*/status.json")):
        body = json.loads(path.read_text())
        if body.get("started_at") and body.get("ended_at"):
            yield {"name": path.parent.name, **body}


def _overbooked(spans: Iterable[tuple[float, float, Mapping[str, int]]], *, what: str) -> list[str]:
    """Moments at which a node gave more GPUs than the two that it has."""
    changes: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for began, ended, placement in spans:
        for node, gpus in placement.items():
            changes[node] += [(began, gpus), (ended, -gpus)]
    found = []
    for node, of_node in changes.items():
        if (most := _most(of_node)) > 2:
            found.append(f"{most} GPUs of node {node} were {what} at once, it has 2")
    return found


def _too_many(spans: Iterable[tuple[float, float]], slots: int, *, what: str) -> list[str]:
    changes = [c for began, ended in spans for c in ((began, 1), (max(began, ended - TICK_S), -1))]
    most = _most(changes)
    return [f"{most} {what} at once, there are {slots} slots"] if most > slots else []


def _most(changes: Iterable[tuple[float, int]]) -> int:
    held = most = 0
    for _, change in sorted(changes):
        held += change
        most = max(most, held)
    return most


def _twice(seen: Sequence[Mapping[str, Any]]) -> list[str]:
    """Jobs of which two attempts trained at once."""
    found = set()
    for sample in seen:
        by_job = Counter(name.split("/")[0] for name in sample["training"])
        found |= {job for job, number in by_job.items() if number > 1}
    return [f"two attempts of {job} trained at once" for job in sorted(found)]


def _unexplained(t: Tables) -> Iterator[str]:
    """Starts without a reason, and stops of which the tenant was not told why."""
    told = Counter((e.job_id, e.code) for e in t.events)
    for job_id, number in Counter(a.job_id for a in t.attempts).items():
        if told[job_id, "job_provisioning"] != number:
            yield f"{job_id} has {number} attempts and {told[job_id, 'job_provisioning']} explained starts"
    for job_id, number in Counter(a.job_id for a in t.attempts if a.stop_asked_at).items():
        if told[job_id, "preemption_requested"] != number:
            yield f"{job_id} was asked {number} times to make room, and told why {told[job_id, 'preemption_requested']} times"


def _reasons(t: Tables) -> Counter[str]:
    return Counter(e.message.rpartition(": ")[2].rstrip(".") for e in t.events if e.code == "job_provisioning")


def _waits(t: Tables) -> dict[str, list[float]]:
    waits: dict[str, list[float]] = defaultdict(list)
    for job in t.jobs.values():
        waits[job.tier].append(job.waited_s)
    return waits


def _prompt(t: Tables, slots: int, since: Mapping[str, datetime]) -> list[float]:
    """Seconds from `since` to the first reservation, of jobs that found a slot free then and nobody who waited for it."""
    spans = [(a.granted_at, a.released_at) for a in t.attempts if a.released_at]
    first = {a.job_id: a.granted_at for a in reversed(t.attempts)}
    queue = [(at, first[job_id]) for job_id, at in since.items() if job_id in first]
    return [
        (start - at).total_seconds()
        for at, start in queue
        if sum(b <= at < e for b, e in spans) + sum(c < at < s for c, s in queue) < slots
    ]


def _first_queued(t: Tables) -> dict[str, datetime]:
    return {e.job_id: e.created_at for e in reversed(t.events) if e.code == "job_queued"}


def _results(e: Evidence, t: Tables) -> tuple[list[str], dict[str, Any]]:
    """Jobs of one seed have the same bytes, however often they were stopped; and how many of them were."""
    by_seed: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    number = Counter(a.job_id for a in t.attempts)
    asked = {a.job_id for a in t.attempts if a.outcome == "preempted"}
    for job_id, prefix in t.finals.items():
        data = (e.home / "objects" / prefix / "adapter_model.safetensors").read_bytes()
        by_seed[t.jobs[job_id].seed][hashlib.sha256(data).hexdigest()].append(job_id)
    different = [f"seed {seed}: {len(found)} different adapters" for seed, found in by_seed.items() if len(found) > 1]
    groups = [[j for same in found.values() for j in same] for found in by_seed.values()]
    undisturbed = [g for g in groups if any(number[j] == 1 for j in g)]
    compared = {
        "adapters": len(t.finals),
        "seeds": len(groups),
        "of_jobs_that_made_room": sum(j in asked for g in undisturbed for j in g),
        "of_jobs_with_several_attempts": sum(number[j] > 1 for g in undisturbed for j in g),
        "seeds_with_an_undisturbed_job": len(undisturbed),
    }
    return different, compared


def _state(engine: sa.Engine) -> dict[str, Any]:
    counted = ("rounds", "starts", "backfills", "preemptions", "promises", "slipped")
    with engine.connect() as conn:
        row = conn.execute(sa.select(*(scheduler_state.c[name] for name in counted))).mappings().one()
    return dict(row)


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {"number": 0}
    at = {f"p{p}": round(ordered[min(len(ordered) - 1, int(len(ordered) * p / 100))], 2) for p in (50, 90, 99)}
    return {"number": len(ordered), "mean": round(sum(ordered) / len(ordered), 2), **at, "longest": round(ordered[-1], 2)}
