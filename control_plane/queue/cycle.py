"""Runs one scheduling cycle: load a snapshot, compute decisions, apply them in one transaction."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.attempts.tables import attempts
from control_plane.billing.metering import service as metering
from control_plane.capacity.configured_pools import pools
from control_plane.jobs.tables import jobs
from control_plane.platform.bulk_updates import among, update_each
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.queue import snapshot as queue_reading
from control_plane.queue.evictions import evict
from control_plane.queue.reservations import ask_to_stop, grant, lock_to_stop, report_late_releases
from control_plane.queue.snapshot import Rows
from control_plane.queue.tables import reservations, scheduler_state
from engine import scheduler
from engine.scheduler import Pool

SCHEDULER_LOCK = 0x66745F73
"""Advisory lock ("ft_s"): one scheduling decision at a time, however many schedulers run."""
RERUNS = 2
"""How often a cycle decides again because a job that should make room is locked by another transaction. The last attempt considers only
jobs that are already locked, so it always succeeds."""


def run_cycle(platform: Platform, *, available: Sequence[Pool] | None = None) -> list[scheduler.Decision]:
    """Run one scheduling cycle; returns the decisions that took effect.

    1. Jobs that start get a reservation with a new fencing token; their event says why they start now. So do evaluations.
    2. Jobs that must make room are asked for a checkpoint and their GPUs.
    3. Waiting jobs get their reason, position and expected start; those that wait for their evaluation its reason.

    Jobs that must make room are locked first, because starts in the same cycle may depend on the GPUs they release. Before anything is
    decided, jobs are asked to stop that operators want to have gone (:mod:`.evictions`).

    Cycles run one at a time; one that dies changes nothing. `available` replaces the installation's pools.
    """
    whole, began = platform.whole, time.monotonic()
    with whole.engine.begin() as conn:
        conn.execute(sa.select(sa.func.pg_advisory_xact_lock(SCHEDULER_LOCK)))
        now = whole.clock()
        evict(conn, now)
        snapshot, rows = queue_reading.read(conn, pools(whole, conn) if available is None else available, now)
        decisions, stoppable = _decide(conn, snapshot, now)
        every = [d for d in decisions if isinstance(d, scheduler.Wait)]
        waits = [d for d in every if d.evaluation is None]
        starts = grant(conn, rows, [d for d in decisions if isinstance(d, scheduler.Start)], now)
        wanted = [d for d in decisions if isinstance(d, scheduler.Preempt)]
        stops = ask_to_stop(conn, wanted, stoppable, now)
        explained = explain(
            conn, rows, waits, left_s={w.job_id: w.expected_s for w in snapshot.waiting}, capped=snapshot.capped, now=now,
            last=conn.execute(sa.select(scheduler_state.c.explained_at).where(scheduler_state.c.id == 1)).scalar(),
        )  # fmt: skip
        explain_evaluations(conn, every)
        report_late_releases(conn, now)
        slipped = explained.dropped + sum(missed(rows[s.job_id], now) for s in starts if s.evaluation is None)
        c = scheduler_state.c
        counts = {
            c.rounds: c.rounds + 1, c.starts: c.starts + len(starts), c.backfills: c.backfills + sum(s.backfill for s in starts),
            c.preemptions: c.preemptions + len(stops), c.promises: c.promises + explained.promises, c.slipped: c.slipped + slipped,
        }  # fmt: skip
        last = {c.round_s: time.monotonic() - began, c.queued: len(waits), c.last_round_at: now}
        whole_queue = {c.explained_at: now} if explained.whole else {}
        conn.execute(sa.update(scheduler_state).where(c.id == 1).values({**counts, **last, **whole_queue}))
    return [*starts, *stops, *waits]


def _decide(conn: Connection, snapshot: scheduler.Snapshot, now: datetime) -> tuple[list[scheduler.Decision], dict[str, int]]:
    """Return decisions whose stops can all be requested, and the attempts of the jobs locked for that."""
    locked: dict[str, int] = {}
    refused: set[str] = set()
    for left in range(RERUNS, -1, -1):
        kept = {r.job_id for r in snapshot.running if (r.job_id not in locked if left == 0 else r.job_id in refused)}
        running = [replace(r, stoppable=False) if r.job_id in kept else r for r in snapshot.running]
        decisions = scheduler.schedule(replace(snapshot, running=running), now=now.timestamp())
        wanted = {d.job_id for d in decisions if isinstance(d, scheduler.Preempt)}
        locked |= lock_to_stop(conn, wanted - set(locked))
        if wanted <= set(locked):
            break
        refused |= wanted - set(locked)
    return decisions, locked


def release(platform: Platform, job_id: str, attempt: int) -> None:
    """Release a reservation whose attempt could not be followed to its end; what ran is billed and refunded.

    Does nothing if the reservation was already released: whoever released it recorded how the attempt ended.
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
        tenant = conn.execute(sa.select(jobs.c.tenant_id).where(jobs.c.id == job_id)).scalar_one()
        metered = metering.Metered(tenant_id=tenant, job_id=job_id, attempt=attempt)
        metering.report_lost(conn, metered, outcome="internal", now=now)
        metering.settle(conn, platform, metered)


EXACT = 100
"""Positions at the head of the queue that every cycle keeps exact: what tenants follow, and one page of the operators' list."""
LONG = 500
"""Queue length up to which every cycle updates all waiting jobs (about 30 ms)."""
EXPLAINED_EVERY = timedelta(seconds=5)
"""Interval for longer queues: one start moves thousands of positions, and writing them takes a tenth of this."""
GRAIN_S, GRAIN = 5.0, 0.02
"""An expected start is rewritten when it moved by more than five seconds plus 2 % of the wait."""
BLOCKED_GRAIN = timedelta(seconds=5)
BLOCKED = frozenset({scheduler.Reason.TENANT_SUSPENDED, scheduler.Reason.MAINTENANCE, scheduler.Reason.EXCEEDS_MAX_QUOTA})
"""Waits that no free GPU ends. They do not count as waiting time, and a tier's promised start counts from their end, as after a cap."""
KEPT_S = 10.0
"""Tolerance for a kept reservation: cycles run every second or two, and GPUs are released a few seconds after training ends."""

Columns = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Explained:
    """What a cycle wrote about waiting jobs, as counts."""

    promises: int = 0
    """New reservations."""
    dropped: int = 0
    """Reservations dropped although their job still waits."""
    whole: bool = True
    """Whether every position in the queue is now up to date."""


def explain(
    conn: Connection,
    rows: Rows,
    waits: Sequence[scheduler.Wait],
    *,
    left_s: Mapping[str, float],
    capped: Collection[str],
    last: datetime | None,
    now: datetime,
) -> Explained:
    """Write what changed. `left_s`: expected seconds of each job; `capped`: tenants at their cap; `last`: when all positions were last
    written."""
    whole = len(waits) <= LONG or last is None or not timedelta(0) <= now - last < EXPLAINED_EVERY
    changed: dict[str, Columns] = {}
    for wait in waits:
        row = rows[wait.job_id]
        blocked_now = (row.tenant_id in capped or wait.reason in BLOCKED) and _is_blocked_anew(row, now)
        decided = blocked_now or _is_decided_anew(row, wait)
        if decided or whole or wait.position <= EXACT:
            explained = _columns(row, wait, left_s[wait.job_id], blocked_now=now if blocked_now else None)
            if decided or _is_changed(row, explained, now):
                changed[wait.job_id] = explained
    waiting = sa.select(jobs.c.id).where(among(jobs.c.id, changed), jobs.c.state == JobState.QUEUED)
    still = conn.execute(waiting.with_for_update(key_share=True, skip_locked=True)).scalars().all() if changed else []
    update_each(conn, jobs, [changed[job_id] for job_id in still])
    news = [(rows[job_id].promise is not None, changed[job_id]["promise"] is not None) for job_id in still]
    return Explained(promises=news.count((False, True)), dropped=news.count((True, False)), whole=whole)


def explain_evaluations(conn: Connection, waits: Sequence[scheduler.Wait]) -> None:
    """Write why trained jobs wait for their evaluation, if that changed; of an ordered evaluation nothing is written."""
    own = {w.job_id: (str(w.reason), w.detail) for w in waits if w.evaluation is not None and w.evaluation.id is None}
    known = sa.select(jobs.c.id, jobs.c.reason, jobs.c.reason_detail).where(among(jobs.c.id, own))
    changed = [r.id for r in conn.execute(known) if (r.reason, r.reason_detail) != own[r.id]] if own else []
    waiting = sa.select(jobs.c.id).where(among(jobs.c.id, changed), jobs.c.state == JobState.EVALUATING)
    locked = waiting.order_by(jobs.c.id).with_for_update(key_share=True, skip_locked=True)
    still = conn.execute(locked).scalars().all() if changed else []
    update_each(conn, jobs, [{"id": job_id, "reason": own[job_id][0], "reason_detail": own[job_id][1]} for job_id in still])


def missed(row: sa.Row[Any], now: datetime) -> bool:
    """Whether a job that starts now had been promised an earlier start."""
    return row.promise is not None and now.timestamp() > float(row.promise.get("earliest", row.promise["start"])) + KEPT_S


def _columns(row: sa.Row[Any], wait: scheduler.Wait, left_s: float, *, blocked_now: datetime | None) -> Columns:
    start = wait.expected_start
    return {
        "id": row.id,
        "reason": str(wait.reason),
        "reason_detail": wait.detail,
        "queue_position": wait.position,
        "ahead": {"jobs": {tier: n for tier, n in wait.ahead.jobs.items() if n}, "num_gpus": wait.ahead.num_gpus},
        "promise": _promise(row, wait.promise),
        "due_at": row.due_at if wait.due_at is None else _moment(wait.due_at),
        "expected_start_at": None if start is None else _moment(start),
        "estimated_finish_at": None if start is None else _moment(start + left_s),
        "barred_until": blocked_now or row.barred_until,
        "capped_at": row.capped_at if blocked_now is None or row.started_at is not None else blocked_now,  # of its first start
    }


def _promise(row: sa.Row[Any], promise: scheduler.Reservation | None) -> dict[str, Any] | None:
    """Return the reservation as stored, with the earliest start ever promised, which is the one to keep."""
    if promise is None:
        return None
    stored = {**asdict(promise), "placement": [list(part) for part in promise.placement]}
    before = (row.promise or {}).get("earliest", promise.start)
    return {**stored, "earliest": min(before, promise.start)}


def _is_blocked_anew(row: sa.Row[Any], now: datetime) -> bool:
    """Whether to record again that a cap or suspension still bars the job."""
    return row.barred_until is None or abs(now - row.barred_until) >= BLOCKED_GRAIN


def _is_decided_anew(row: sa.Row[Any], wait: scheduler.Wait) -> bool:
    """Whether the decision differs from the job's row; if so it is written at once, because the next cycle reads it."""
    if row.reason != wait.reason or (wait.due_at is not None and (row.due_at is None or abs(row.due_at.timestamp() - wait.due_at) > 1e-3)):
        return True
    return (row.promise is not None or wait.promise is not None) and row.promise != _promise(row, wait.promise)


def _is_changed(row: sa.Row[Any], explained: Columns, now: datetime) -> bool:
    """Whether its position or expected start changed."""
    if (row.queue_position, row.reason_detail, row.ahead) != (explained["queue_position"], explained["reason_detail"], explained["ahead"]):
        return True
    start = explained["expected_start_at"]
    grain = timedelta(seconds=GRAIN_S) + (GRAIN * abs(start - now) if start is not None else timedelta(0))
    return _moved(row.expected_start_at, start, grain) or _moved(row.estimated_finish_at, explained["estimated_finish_at"], grain)


def _moved(before: datetime | None, after: datetime | None, grain: timedelta) -> bool:
    if before is None or after is None:
        return before is not after
    return abs(after - before) > grain


def _moment(unix: float) -> datetime:
    return datetime.fromtimestamp(unix, tz=UTC)
