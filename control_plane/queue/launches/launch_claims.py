"""Who makes the Dagster run of a stage: a sensor's tick or a nudge, never both, and never twice.

A run key has one run for ever; a stage that needs another run gets another key (:func:`.pending_runs.replace_run`).

1. Whoever means to ask for a run claims its key; the claim of one who made no run of it is over after :data:`CLAIM_S`.
2. The run binds its key when it enters Dagster's queue (:func:`bind`), whoever asked for it: a second one is turned away there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection

from control_plane.platform.context import Platform
from control_plane.queue.launches.pending_runs import DueRun
from control_plane.queue.tables import run_launches

CLAIM_S = 30.0
"""Longer than a tick of 25 requests at 0.3 s each with its wait for the daemon; a claimant that died costs this much."""


def claim(platform: Platform, due: Sequence[DueRun], *, by: str) -> list[DueRun]:
    """Those of `due` whose run `by` may now ask for."""
    if not due:
        return []
    now = platform.clock()
    rows = [{"run_key": d.run_key, "job_id": d.job_id, "claimed_by": by, "claimed_at": now} for d in due]
    statement = insert(run_launches).values(rows)
    over = run_launches.c.run_id.is_(None) & (run_launches.c.claimed_at < now - timedelta(seconds=CLAIM_S))
    mine = statement.on_conflict_do_update(
        index_elements=["run_key"],
        set_={"claimed_by": statement.excluded.claimed_by, "claimed_at": statement.excluded.claimed_at},
        where=over,
    ).returning(run_launches.c.run_key)
    with platform.engine.begin() as conn:
        won = set(conn.execute(mine).scalars())
    return [d for d in due if d.run_key in won]


def give_up(platform: Platform, run_keys: Collection[str], *, by: str) -> None:
    """Let go of claims of `by` from which no run came: the next who looks may ask for it at once."""
    this = run_launches.c.run_key.in_(run_keys) & (run_launches.c.claimed_by == by) & run_launches.c.run_id.is_(None)
    with platform.engine.begin() as conn:
        conn.execute(sa.delete(run_launches).where(this))


def unbound(platform: Platform, due: Sequence[DueRun]) -> list[DueRun]:
    """Those of `due` that have no run yet."""
    query = sa.select(run_launches.c.run_key).where(
        run_launches.c.run_key.in_([d.run_key for d in due]), run_launches.c.run_id.is_not(None)
    )
    with platform.engine.connect() as conn:
        bound = set(conn.execute(query).scalars())
    return [d for d in due if d.run_key not in bound]


def bind(conn: Connection, run_key: str, job_id: str, run_id: str, *, by: str) -> str | None:
    """Make `run_id` the run of the key, whoever claimed it; the id of the run that has it already, if that is another."""
    statement = insert(run_launches).values(run_key=run_key, job_id=job_id, run_id=run_id, claimed_by=by, claimed_at=sa.func.now())
    bound = statement.on_conflict_do_update(
        index_elements=["run_key"],
        set_={"run_id": run_id, "claimed_by": by},
        where=run_launches.c.run_id.is_(None) | (run_launches.c.run_id == run_id),
    )
    if conn.execute(bound.returning(run_launches.c.run_id)).first() is not None:
        return None
    return str(conn.execute(sa.select(run_launches.c.run_id).where(run_launches.c.run_key == run_key)).scalar_one())


def asked_by(platform: Platform) -> Mapping[str, int]:
    """How many runs were asked for by whom."""
    query = sa.select(run_launches.c.claimed_by, sa.func.count()).where(run_launches.c.run_id.is_not(None))
    with platform.engine.connect() as conn:
        return {str(who): int(count) for who, count in conn.execute(query.group_by(run_launches.c.claimed_by))}
