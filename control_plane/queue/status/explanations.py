"""What waiting jobs are told, and what is kept of them between rounds: only rows that say something new are written."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.jobs.tables import jobs
from control_plane.platform.bulk_updates import among, update_each
from control_plane.platform.job_states import JobState
from control_plane.queue import scheduler
from control_plane.queue.snapshot import Rows

EXACT = 100
"""Places at the head of the queue that each round keeps exact: what a tenant follows, and a page of the operators' list."""
LONG = 500
"""Waiting jobs up to which every round tells all of them: about 30 ms."""
EXPLAINED_EVERY = timedelta(seconds=5)
"""Of a longer queue: one start moves thousands of places, and to write them takes a tenth of this."""
GRAIN_S, GRAIN = 5.0, 0.02
"""An expected start is written again when it moved by more than five seconds and a fiftieth of the wait: it is an estimate."""
BARRED_GRAIN = timedelta(seconds=5)
BARRED = frozenset({scheduler.Reason.TENANT_SUSPENDED, scheduler.Reason.EXCEEDS_MAX_QUOTA})
"""Waits that no GPU ends: they are no waiting, and what a tier promises counts from their end, as it does for a cap."""
KEPT_S = 10.0
"""A promise is kept if the job starts so soon after it: rounds come every second or two, and GPUs are given back a few seconds
after their trainings end."""

Told = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Explained:
    """What a round told, in numbers."""

    promises: int = 0
    """That were not there before."""
    dropped: int = 0
    """Promises of jobs that wait on without one."""
    whole: bool = True
    """Every place in the queue is as it is told."""


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
    """Write what changed; `left_s`: what each job would take, `capped`: tenants at their cap, `last`: when all places were told."""
    whole = len(waits) <= LONG or last is None or not timedelta(0) <= now - last < EXPLAINED_EVERY
    changed: dict[str, Told] = {}
    for wait in waits:
        row = rows[wait.job_id]
        barred_now = (row.tenant_id in capped or wait.reason in BARRED) and _barred_anew(row, now)
        decided = barred_now or _is_decided_anew(row, wait)
        if decided or whole or wait.position <= EXACT:
            told = _told(row, wait, left_s[wait.job_id], barred_now=now if barred_now else None)
            if decided or _stands_elsewhere(row, told, now):
                changed[wait.job_id] = told
    waiting = sa.select(jobs.c.id).where(among(jobs.c.id, changed), jobs.c.state == JobState.QUEUED)
    still = conn.execute(waiting.with_for_update(key_share=True, skip_locked=True)).scalars().all() if changed else []
    update_each(conn, jobs, [changed[job_id] for job_id in still])
    news = [(rows[job_id].promise is not None, changed[job_id]["promise"] is not None) for job_id in still]
    return Explained(promises=news.count((False, True)), dropped=news.count((True, False)), whole=whole)


def missed(row: sa.Row[Any], now: datetime) -> bool:
    """Whether a job that starts now was promised an earlier start."""
    return row.promise is not None and now.timestamp() > float(row.promise.get("earliest", row.promise["start"])) + KEPT_S


def _told(row: sa.Row[Any], wait: scheduler.Wait, left_s: float, *, barred_now: datetime | None) -> Told:
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
        "barred_until": barred_now or row.barred_until,
        "capped_at": row.capped_at if barred_now is None or row.started_at is not None else barred_now,  # of its first start
    }


def _promise(row: sa.Row[Any], promise: scheduler.Promise | None) -> dict[str, Any] | None:
    """As it is stored, with the earliest start that was ever promised: that is what has to be kept."""
    if promise is None:
        return None
    stored = {**asdict(promise), "placement": [list(part) for part in promise.placement]}
    before = (row.promise or {}).get("earliest", promise.start)
    return {**stored, "earliest": min(before, promise.start)}


def _barred_anew(row: sa.Row[Any], now: datetime) -> bool:
    """Whether it has to be written that the cap of its tenant, or what else no GPU ends, still keeps the job from GPUs."""
    return row.barred_until is None or abs(now - row.barred_until) >= BARRED_GRAIN


def _is_decided_anew(row: sa.Row[Any], wait: scheduler.Wait) -> bool:
    """Whether the round decided about the job what is not in its row: that is written at once, the next round is given it."""
    if row.reason != wait.reason or (wait.due_at is not None and (row.due_at is None or abs(row.due_at.timestamp() - wait.due_at) > 1e-3)):
        return True
    return (row.promise is not None or wait.promise is not None) and row.promise != _promise(row, wait.promise)


def _stands_elsewhere(row: sa.Row[Any], told: Told, now: datetime) -> bool:
    """Whether its place, or when it is expected to start, is another one than it was told."""
    if (row.queue_position, row.reason_detail, row.ahead) != (told["queue_position"], told["reason_detail"], told["ahead"]):
        return True
    start = told["expected_start_at"]
    grain = timedelta(seconds=GRAIN_S) + (GRAIN * abs(start - now) if start is not None else timedelta(0))
    return _moved(row.expected_start_at, start, grain) or _moved(row.estimated_finish_at, told["estimated_finish_at"], grain)


def _moved(before: datetime | None, after: datetime | None, grain: timedelta) -> bool:
    if before is None or after is None:
        return before is not after
    return abs(after - before) > grain


def _moment(unix: float) -> datetime:
    return datetime.fromtimestamp(unix, tz=UTC)
