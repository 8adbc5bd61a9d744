"""The queue's hands: one round reads the snapshot, asks the policy, and makes its decisions so, in one transaction."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.attempts.tables import attempts
from control_plane.billing.metering import service as metering
from control_plane.capacity.active_pools import pools
from control_plane.capacity.pools import Pool
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.queue import reservations as granting
from control_plane.queue import scheduler, stalled_starts
from control_plane.queue import snapshot as queue_reading
from control_plane.queue.snapshot import Rows
from control_plane.queue.status import explanations
from control_plane.queue.status.explanations import Explained
from control_plane.queue.tables import reservations, scheduler_state

SCHEDULER_LOCK = 0x66745F73
"""Advisory lock ("ft_s"): one scheduling decision at a time, however many schedulers run."""
RERUNS = 2
"""Times that a round decides again because somebody who was to make room cannot be asked. In the last one only those make room who are
locked by then, so it comes about."""


def place(platform: Platform, *, available: Sequence[Pool] | None = None) -> list[scheduler.Decision]:
    """One scheduling round; returns what was decided and came about.

    1. Jobs that start get a reservation with a new fencing token, and their event says why it is now.
    2. Jobs that are to make room are asked for a checkpoint and their GPUs.
    3. Jobs that wait are told why, where they stand, and what was promised to them.

    Those who are to make room are locked before anything is done: starts beside them may rest on what they release.

    Rounds come one after the other, and one that dies leaves nothing. `available`: pools in place of the installation's.
    """
    whole, began = platform.whole, time.monotonic()
    with whole.engine.begin() as conn:
        conn.execute(sa.select(sa.func.pg_advisory_xact_lock(SCHEDULER_LOCK)))
        now = whole.clock()
        snapshot, rows = queue_reading.read(conn, pools(whole, conn) if available is None else available, now)
        decisions, stoppable = _decide(conn, snapshot, now)
        waits = [d for d in decisions if isinstance(d, scheduler.Wait)]
        starts = granting.grant(conn, rows, [d for d in decisions if isinstance(d, scheduler.Start)], now)
        wanted = [d for d in decisions if isinstance(d, scheduler.Preempt)]
        stops = granting.ask_to_stop(conn, wanted, stoppable, now)
        told = explanations.explain(
            conn, rows, waits, left_s={w.job_id: w.expected_s for w in snapshot.waiting}, capped=snapshot.capped, last=_last_told(conn),
            now=now,
        )  # fmt: skip
        stalled_starts.report(conn, now)
        took_s, queued = time.monotonic() - began, len(waits)
        _count(conn, _Round(rows=rows, starts=starts, stops=stops, queued=queued, told=told, took_s=took_s), now)
    return [*starts, *stops, *waits]


def _decide(conn: Connection, snapshot: scheduler.Snapshot, now: datetime) -> tuple[list[scheduler.Decision], dict[str, int]]:
    """Decisions of which every stop can be asked for, and the attempts of the jobs that are locked for that."""
    locked: dict[str, int] = {}
    refused: set[str] = set()
    for left in range(RERUNS, -1, -1):
        running = [replace(r, stoppable=r.job_id in locked if left == 0 else r.job_id not in refused) for r in snapshot.running]
        decisions = scheduler.schedule(replace(snapshot, running=running), now=now.timestamp())
        wanted = {d.job_id for d in decisions if isinstance(d, scheduler.Preempt)}
        locked |= granting.lock_to_stop(conn, wanted - set(locked))
        if wanted <= set(locked):
            break
        refused |= wanted - set(locked)
    return decisions, locked


@dataclass(frozen=True, kw_only=True, slots=True)
class _Round:
    rows: Rows
    starts: Sequence[scheduler.Start]
    stops: Sequence[scheduler.Preempt]
    queued: int
    told: Explained
    took_s: float


def _last_told(conn: Connection) -> datetime | None:
    return conn.execute(sa.select(scheduler_state.c.explained_at).where(scheduler_state.c.id == 1)).scalar()


def _count(conn: Connection, of: _Round, now: datetime) -> None:
    c = scheduler_state.c
    conn.execute(
        sa.update(scheduler_state)
        .where(c.id == 1)
        .values(
            rounds=c.rounds + 1,
            starts=c.starts + len(of.starts),
            backfills=c.backfills + sum(s.backfill for s in of.starts),
            preemptions=c.preemptions + len(of.stops),
            promises=c.promises + of.told.promises,
            slipped=c.slipped + of.told.dropped + sum(explanations.missed(of.rows[s.job_id], now) for s in of.starts),
            round_s=of.took_s,
            queued=of.queued,
            last_round_at=now,
            **({"explained_at": now} if of.told.whole else {}),
        )
    )


def release(platform: Platform, job_id: str, attempt: int) -> None:
    """Give back a reservation whose attempt nobody could follow to its end; what ran is billed and given back.

    Nothing happens where it was given back before: whoever did that has told how the attempt ended.
    """
    now = platform.clock()
    with platform.engine.begin() as conn:
        this = (reservations.c.job_id == job_id) & (reservations.c.attempt == attempt) & reservations.c.released_at.is_(None)
        if conn.execute(sa.update(reservations).where(this).values(released_at=now)).rowcount == 0:
            return
        conn.execute(
            sa.update(attempts)
            .where(attempts.c.job_id == job_id, attempts.c.attempt == attempt, attempts.c.ended_at.is_(None))
            .values(outcome="internal", ended_at=now)
        )
        job = conn.execute(sa.select(jobs).where(jobs.c.id == job_id)).mappings().one()
        metering.report_lost(conn, job, attempt, outcome="internal", now=now)
        metering.settle(conn, platform, job["tenant_id"], job_id, attempt)
