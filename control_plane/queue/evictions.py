"""Stops attempts that operators want to have gone: on a node that is to be empty, and under maintenance that does not wait for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.attempts.tables import attempts
from control_plane.capacity.maintenance import list_all, scopes
from control_plane.capacity.node_health import NODES
from control_plane.capacity.tables import Maintenance, node_drains
from control_plane.jobs.tables import jobs
from control_plane.queue.reservations import ask_to_stop, lock_to_stop
from control_plane.queue.tables import reservations
from core.workload import Kind
from engine.scheduler import DEFAULT_RULES, Preempt

OPERATORS, SICK_NODE = "operators", "sick_node"
"""In the place of the job that an attempt makes room for: maintenance, and hardware that is out of service."""
NOTICE = timedelta(seconds=DEFAULT_RULES.handshake_s)
"""Attempts are asked this long before they are to be gone."""
ONWARD = "the job saves a checkpoint, returns to the queue and resumes from there"


def evict(conn: Connection, now: datetime) -> None:
    """Ask the attempts to stop whose time has come, each once.

    1. One of its nodes is to be empty by now.
    2. Its tenant, its pool or the platform is under maintenance, and no attempt is to run in :data:`NOTICE`.

    A training saves a checkpoint, an evaluation or an export begins again; all go on where jobs may start. One whose rows are locked is
    asked in the next cycle.
    """
    sick = set(conn.execute(sa.select(node_drains.c.node).where(node_drains.c.stop_at <= now)).scalars())
    closed = {m.scope: m for m in list_all(conn) if m.stop_at is not None and m.stop_at <= now + NOTICE}
    if not sick and not closed:
        return
    r = reservations.c
    held = (
        sa.select(r.job_id, r.attempt, r.pool, r.kind, jobs.c.tenant_id, NODES.label("nodes"))
        .join(jobs, jobs.c.id == r.job_id)
        .join(attempts, (attempts.c.job_id == r.job_id) & (attempts.c.attempt == r.attempt))
        .where(r.released_at.is_(None), r.stop_asked_at.is_(None))
    )
    due = {(h.job_id, h.kind): why for h in conn.execute(held) if (why := _why(h.nodes, scopes(h.pool, h.tenant_id), sick, closed))}
    attempt_of = lock_to_stop(conn, [job_id for job_id, kind in due if kind == Kind.TRAIN])
    stops = ((job_id, due[job_id, Kind.TRAIN]) for job_id in attempt_of)
    ask_to_stop(conn, [Preempt(job_id=i, for_job=cause, lost_s=0.0, detail=why) for i, (cause, why) in stops], attempt_of, now)
    for for_job in (SICK_NODE, OPERATORS):
        others = [job_id for (job_id, kind), (cause, _) in due.items() if kind != Kind.TRAIN and cause == for_job]
        held_now = r.job_id.in_(others) & r.released_at.is_(None)
        conn.execute(sa.update(reservations).where(held_now).values(stop_asked_at=now, preempted_for=for_job))


def _why(nodes: Sequence[str], within: Sequence[str], sick: set[str], closed: Mapping[str, Maintenance]) -> tuple[str, str] | None:
    """Return for what, and why in words, an attempt on `nodes` and `within` these scopes is to leave; None if it may stay."""
    if sick.intersection(nodes):
        return SICK_NODE, f"a node of the job is out of service because of its hardware; {ONWARD}"
    found = next((closed[scope] for scope in within if scope in closed), None)
    return None if found is None else (OPERATORS, f"{found.words}; {ONWARD}")
