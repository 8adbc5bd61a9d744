"""What a job's ended attempts came to: whether the next failure is one of a row without progress."""

from __future__ import annotations

import sqlalchemy as sa

from control_plane.attempts.tables import attempts
from control_plane.jobs.tables import job_events
from control_plane.platform.context import Platform
from control_plane.queue.tables import reservations
from ft_assets.training.failures import Outcome, PastAttempt


def history(platform: Platform, job_id: str) -> list[PastAttempt]:
    """The job's ended attempts, oldest first.

    What they committed is read from the events: a row is retired, and names the newest attempt that committed its step. After
    an attempt that ran out of memory it counts anew, the next one may have started from the beginning.
    """
    step, by = (sa.cast(job_events.c.data[name].astext, sa.Integer) for name in ("step", "attempt"))
    told = (
        sa.select(sa.func.coalesce(sa.func.max(step), 0))
        .where(job_events.c.job_id == attempts.c.job_id, job_events.c.code == "checkpoint", by == attempts.c.attempt)
        .scalar_subquery()
    )
    reached = sa.func.greatest(told, sa.func.coalesce(attempts.c.from_step, 0)).label("reached")
    asked = (
        sa.exists()
        .where(reservations.c.job_id == attempts.c.job_id, reservations.c.attempt == attempts.c.attempt)
        .where(reservations.c.stop_asked_at.is_not(None))
        .label("asked")
    )
    query = sa.select(attempts, reached, asked).where(attempts.c.job_id == job_id, attempts.c.ended_at.is_not(None))
    with platform.engine.connect() as conn:
        rows = conn.execute(query.order_by(attempts.c.attempt)).all()
    found: list[PastAttempt] = []
    furthest = 0
    for row in rows:
        furthest = max(furthest, row.reached)
        made_room = row.asked and row.outcome == Outcome.PREEMPTED
        found.append(PastAttempt(code=row.outcome or "", committed_step=furthest, last_step=row.last_step or 0, asked=made_room))
        if row.outcome == Outcome.OOM:
            furthest = 0
    return found
