"""Grant reservations to jobs that start, ask jobs to make room, and report reservations whose workload does not start.

A scheduling cycle waits at most :data:`LOCK_WAIT_MS` for a row that another transaction holds; it skips that job, and the next cycle
sees the change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.adapters.exporting import orders
from control_plane.attempts.tables import attempts
from control_plane.capacity import configured_pools, gpu_devices
from control_plane.evaluations.tables import evaluations
from control_plane.jobs.tables import job_events, jobs
from control_plane.jobs.transitions import Move, record_many, transition_many
from control_plane.platform.bulk_updates import among, update_each
from control_plane.platform.context import Platform
from control_plane.platform.job_events import FOR_OPERATORS, Event
from control_plane.platform.job_states import JobState
from control_plane.platform.records import many
from control_plane.queue.snapshot import Rows
from control_plane.queue.tables import held_devices, reservations
from core.epoch_time import span_words
from core.workload import Kind, NodeShare
from engine import scheduler

PREEMPT = "preempt"
"""Value of ``jobs.stop_requested`` for preemption."""
PREEMPTION_REQUESTED = "preemption_requested"
"""Event code: the job is asked to make room."""
LOCK_WAIT_MS = 500
"""Reports of agents lock them every 1 to 15 s, for a few milliseconds. Half of the server's ``deadlock_timeout``, so that in a deadlock
the scheduling cycle gives way."""
LOCK_ERRORS = ("55P03", "40P01")
"""PostgreSQL error codes for a lock timeout and a deadlock."""
TRAINING = (JobState.PROVISIONING, JobState.RUNNING)


def grant(conn: Connection, rows: Rows, starts: Sequence[scheduler.Start], now: datetime) -> list[scheduler.Start]:
    """Grant GPUs to the jobs that start, each with a new fencing token; returns the starts whose jobs were still waiting.

    The attempts of a job are numbered over its trainings, its evaluations and its exports.
    """
    trained = [s for s in starts if s.evaluation is None]
    evaluated = [s for s in starts if s.evaluation is not None]
    queued = _still_waiting(conn, [s.job_id for s in trained], jobs.c.state == JobState.QUEUED)
    wanted = _begin_evaluations(conn, [s for s in evaluated if _ordered(s, Kind.EXPORT) is None], now)
    wanted |= orders.begin(conn, [id_ for s in evaluated if (id_ := _ordered(s, Kind.EXPORT)) is not None], now)
    given = [s for s in trained if s.job_id in queued] + [s for s in evaluated if s.job_id in wanted]
    if not given:
        return []
    number = _next_attempts(conn, [s.job_id for s in given])
    granted = [
        {
            "job_id": s.job_id, "attempt": number[s.job_id], "pool": s.pool, "num_gpus": s.num_gpus, "devices": devices,
            "placement": [list(part) for part in s.placement], "backfill": s.backfill, "granted_at": now,
            "kind": Kind.TRAIN if s.evaluation is None else s.evaluation.kind, "evaluation_id": _ordered(s, Kind.EVALUATE),
            "export_id": _ordered(s, Kind.EXPORT),
        }
        for s, devices in zip(given, assign_devices(conn, given), strict=True)
    ]  # fmt: skip
    conn.execute(sa.insert(reservations), granted)
    conn.execute(sa.insert(attempts), [{"job_id": job, "attempt": n, "workload": f"{job}-a{n}"} for job, n in number.items()])
    transition_many(conn, [_move(rows[s.job_id], s, now) for s in given if s.evaluation is None], now=now)
    return given


def _ordered(start: scheduler.Start, kind: Kind) -> str | None:
    """Return the id of the ordered evaluation or export that starts."""
    return start.evaluation.id if start.evaluation is not None and start.evaluation.kind is kind else None


def _next_attempts(conn: Connection, job_ids: Sequence[str]) -> dict[str, int]:
    newest = sa.func.greatest(jobs.c.attempt, sa.func.max(reservations.c.attempt))
    query = sa.select(jobs.c.id, newest).outerjoin(reservations, reservations.c.job_id == jobs.c.id)
    return {job_id: n + 1 for job_id, n in conn.execute(query.where(among(jobs.c.id, job_ids)).group_by(jobs.c.id))}


def _begin_evaluations(conn: Connection, starts: Sequence[scheduler.Start], now: datetime) -> set[str]:
    """Return the jobs that are still to be evaluated, and mark their ordered evaluations as running."""
    ordered = {s.evaluation.id: s.job_id for s in starts if s.evaluation is not None and s.evaluation.id is not None}
    own = _still_waiting(conn, [s.job_id for s in starts if s.job_id not in ordered.values()], jobs.c.state == JobState.EVALUATING)
    update_each(conn, jobs, [{"id": job_id, "reason": None, "reason_detail": None} for job_id in own])
    e = evaluations.c
    begun = sa.update(evaluations).where(among(e.id, ordered), e.state == "queued")
    begun = begun.values(state="running", runs=e.runs + 1, replaced_runs=0, started_at=now)
    return own | ({ordered[id_] for id_ in conn.execute(begun.returning(e.id)).scalars()} if ordered else set())


def _still_waiting(conn: Connection, job_ids: Sequence[str], which: sa.ColumnElement[bool]) -> set[str]:
    if not job_ids:
        return set()
    query = sa.select(jobs.c.id).where(among(jobs.c.id, job_ids), which).order_by(jobs.c.id)
    return set(conn.execute(query.with_for_update(skip_locked=True)).scalars())


def _move(job: sa.Row[Any], start: scheduler.Start, now: datetime) -> Move:
    attempt, waited = job.attempt + 1, waited_s(job, now)  # nothing is evaluated before the last training
    if start.backfill:
        why = "they are free, and using them delays no reservation"
    else:
        why = "they were reserved for it" if job.promise else "it is the first job in the queue that they fit"
    held = f"{start.num_gpus} GPU{'s' if start.num_gpus > 1 else ''} of pool {start.pool}"
    return Move(
        job_id=job.id,
        target=JobState.PROVISIONING,
        message=f"Attempt {attempt} holds {held} after {span_words(waited)} in the queue: {why}.",
        data={"attempt": attempt, "pool": start.pool, "num_gpus": start.num_gpus, "backfill": start.backfill, "waited_s": round(waited, 3)},
        columns={"attempt": attempt, "train_runs": 0, "stop_requested": None},
    )


def waited_s(job: sa.Row[Any], now: datetime) -> float:
    """Return seconds in the queue over all stays, excluding the time it was barred in this one."""
    since: datetime = job.waiting_since or job.queued_at or job.created_at
    return float(job.waited_s) + max(0.0, (now - max(since, job.barred_until or since)).total_seconds())


def lock_to_stop(conn: Connection, job_ids: Collection[str]) -> dict[str, int]:
    """Lock those of `job_ids` that can be asked to make room; returns their attempts.

    Skips jobs that have ended, were already asked, or are locked by another transaction for longer than :data:`LOCK_WAIT_MS`. Locks are
    taken in the same order as at the end of an attempt: the reservation, then the job.
    """
    if not job_ids:
        return {}
    active = sa.select(reservations.c.job_id, reservations.c.attempt).where(
        among(reservations.c.job_id, job_ids), reservations.c.released_at.is_(None), reservations.c.stop_asked_at.is_(None)
    )
    attempt_of = {r.job_id: r.attempt for r in _locked(conn, active.order_by(reservations.c.job_id))}
    training = sa.select(jobs.c.id).where(
        among(jobs.c.id, attempt_of), jobs.c.state.in_([s.value for s in TRAINING]), jobs.c.stop_requested.is_(None)
    )
    return {r.id: attempt_of[r.id] for r in _locked(conn, training.order_by(jobs.c.id))}


def _locked(conn: Connection, query: sa.Select[Any]) -> Sequence[sa.Row[Any]]:
    """Lock the rows of `query`; skips rows that another transaction holds for longer than :data:`LOCK_WAIT_MS`."""
    try:
        with conn.begin_nested():
            conn.execute(sa.text(f"SET LOCAL lock_timeout = {LOCK_WAIT_MS}"))
            rows = conn.execute(query.with_for_update()).all()
            conn.execute(sa.text("SET LOCAL lock_timeout TO DEFAULT"))
            return rows
    except sa.exc.OperationalError as error:
        if getattr(error.orig, "pgcode", None) not in LOCK_ERRORS:
            raise
    return conn.execute(query.with_for_update(skip_locked=True)).all()


def ask_to_stop(
    conn: Connection, preempts: Sequence[scheduler.Preempt], attempt_of: Mapping[str, int], now: datetime
) -> list[scheduler.Preempt]:
    """Ask running jobs, locked as `attempt_of`, for a checkpoint and their GPUs; returns those that were asked.

    Either all jobs that make room for one job are asked, or none: part of its GPUs would not let it start, and work would be lost for
    nothing.
    """
    requested = _whole_sets(preempts, attempt_of)
    update_each(conn, jobs, [{"id": p.job_id, "stop_requested": PREEMPT} for p in requested])
    stops = [
        {"job_id": p.job_id, "attempt": attempt_of[p.job_id], "stop_asked_at": now, "preempted_for": p.for_job}
        for p in requested
    ]  # fmt: skip
    update_each(conn, reservations, stops, key=("job_id", "attempt"))
    told = [
        Event(code=PREEMPTION_REQUESTED, level="warn", message=_sentence(p.detail), data={"attempt": attempt_of[p.job_id]})
        for p in requested
    ]
    record_many(conn, [(p.job_id, event) for p, event in zip(requested, told, strict=True)], now=now)
    return requested


def _whole_sets(preempts: Sequence[scheduler.Preempt], able: Container[str]) -> list[scheduler.Preempt]:
    """Keep preemptions only for jobs all of whose victims are `able` to stop."""
    refused = {p.for_job for p in preempts if p.job_id not in able}
    return [p for p in preempts if p.for_job not in refused]


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:].rstrip('.')}."


def assign_devices(conn: Connection, starts: Sequence[scheduler.Start]) -> list[list[list[int]]]:
    """Assign device numbers to each of `starts`, node by node as in its placement, avoiding devices of other reservations."""
    held = defaultdict[str, set[int]](set)
    for node, number in conn.execute(sa.select(held_devices.c.node, held_devices.c.number)):
        held[node].add(number)
    return [gpu_devices.assign(start.placement, held) for start in starts]


def local_placement(platform: Platform, placement: Iterable[Sequence[object]], numbers: Iterable[Sequence[int]]) -> tuple[NodeShare, ...]:
    """Turn device `numbers` by node into numbers of this machine; a machine that stands for several nodes has the GPUs of all of them."""
    first: dict[str, int] = {}
    total = 0
    for pool in configured_pools.planned(platform):
        for node in pool.nodes:
            first[node.name], total = total, total + node.num_gpus
    return tuple(
        NodeShare(node=str(node), devices=tuple(first.get(str(node), 0) + n for n in of_node))
        for (node, _), of_node in zip(placement, numbers, strict=False)
    )


ADMITTED_WITHIN = timedelta(seconds=60)
"""Time allowed from reservation to workload: as long as the whole way from submission to start while GPUs are free."""
RELEASE_OVERDUE = "release_overdue"


STOPPED_WITHIN = timedelta(seconds=120)
"""From the request to stop: the agent hears of it within 15 s, saving may take 25 s, and the workload is killed after 30 s; nearly three
times that is a fault."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OverdueRelease:
    """A reservation whose workload has not started in time, or was asked to stop and still holds its GPUs."""

    job_id: str
    attempt: int
    pool: str
    num_gpus: int
    kind: Literal["start", "stop"]
    age_s: float
    """Seconds since it was granted, or asked to stop."""


def overdue_releases(conn: Connection, now: datetime) -> list[OverdueRelease]:
    """Return reservations whose workload has not started within :data:`ADMITTED_WITHIN`, then those not stopped within
    :data:`STOPPED_WITHIN`, each oldest first."""
    unstopped = _overdue("stop", reservations.c.stop_asked_at, STOPPED_WITHIN, now)
    return many(conn, _unstarted(now), OverdueRelease) + many(conn, unstopped, OverdueRelease)


def report_late_releases(conn: Connection, now: datetime) -> int:
    """Record one event per late attempt for operators; returns the number of events."""
    reported = job_events.c.data["attempt"].as_integer() == reservations.c.attempt
    known = sa.exists().where(job_events.c.job_id == reservations.c.job_id, job_events.c.code == RELEASE_OVERDUE, reported)
    late = {o.job_id: o for o in many(conn, _unstarted(now).where(~known), OverdueRelease)}
    if not late:
        return 0
    lock = sa.select(jobs.c.id).where(among(jobs.c.id, late)).order_by(jobs.c.id).with_for_update(skip_locked=True)
    locked = conn.execute(lock).scalars().all()
    record_many(conn, [(job_id, _event(late[job_id])) for job_id in locked], now=now)
    return len(locked)


def _unstarted(now: datetime) -> sa.Select[Any]:
    r = reservations.c
    return (
        _overdue("start", r.granted_at, ADMITTED_WITHIN, now)
        .join(jobs, jobs.c.id == r.job_id)
        .join(attempts, (attempts.c.job_id == r.job_id) & (attempts.c.attempt == r.attempt))
        .where(sa.or_(jobs.c.state == JobState.PROVISIONING, r.kind != Kind.TRAIN), attempts.c.started_at.is_(None))
    )


def _overdue(kind: str, since: sa.Column[datetime], within: timedelta, now: datetime) -> sa.Select[Any]:
    r, moment = reservations.c, sa.literal(now, sa.DateTime(timezone=True))
    age_s = sa.cast(sa.func.extract("epoch", moment - since), sa.Float).label("age_s")
    query = sa.select(r.job_id, r.attempt, r.pool, r.num_gpus, sa.literal(kind).label("kind"), age_s)
    return query.where(r.released_at.is_(None), since < now - within).order_by(since, r.job_id)


def _event(late: OverdueRelease) -> Event:
    return Event(
        code=RELEASE_OVERDUE,
        level="warn",
        message=f"Attempt {late.attempt} got {late.num_gpus} GPUs of pool {late.pool} {late.age_s:.0f} s ago but its workload has not "
        f"started (limit {ADMITTED_WITHIN.total_seconds():.0f} s). Check its run and the nodes of the pool.",
        data={"audience": FOR_OPERATORS, "attempt": late.attempt, "age_s": round(late.age_s, 1)},
    )
