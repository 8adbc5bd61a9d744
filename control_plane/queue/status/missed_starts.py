"""Jobs that did not start, or started later, than their tier promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.jobs.tables import jobs
from control_plane.platform.job_states import JobState
from control_plane.platform.records import many
from control_plane.queue.cycle import BLOCKED
from control_plane.tenants.rules import TIERS

PROMISED = {name: timedelta(seconds=t.starts_within_s) for name, t in TIERS.items() if t.starts_within_s is not None}
"""From submission, or from the end of a cap or suspension, to the first start."""
DELAY = "(jobs.started_at - GREATEST(jobs.created_at, jobs.capped_at))"
"""From the promise to the first start, worded as in its index."""
Late = Callable[[timedelta], sa.ColumnElement[bool]]


@dataclass(frozen=True, kw_only=True, slots=True)
class MissedStart:
    """A job whose tier promised an earlier start."""

    id: str
    tenant: str
    tier: str
    num_gpus: int
    since: datetime
    """From when the promise counts."""
    started_at: datetime | None
    reason: str | None
    """Why it waits, while it does."""

    @property
    def promised_at(self) -> datetime:
        """The latest start that was promised."""
        return self.since + PROMISED[self.tier]


def num_waiting(conn: Connection, now: datetime) -> dict[str, int]:
    """Count by tier the jobs that have waited longer than promised, and could start if GPUs were free."""
    return _counted(conn, _waiting(now))


def num_late(conn: Connection) -> dict[str, int]:
    """Count by tier the jobs that ever started late; an index of first starts finds them."""
    return _counted(conn, _late)


def num_started(conn: Connection) -> dict[str, int]:
    """Count by tier the jobs that ever started under a promise; the index of first starts finds them."""
    return _counted(conn, lambda _within: sa.literal_column(DELAY, sa.Interval).is_not(None))


def recent(conn: Connection, now: datetime, *, within: timedelta, limit: int) -> list[MissedStart]:
    """Return the jobs that wait longer than promised, the longest first, then those that started late `within` this time."""
    j = jobs.c
    since = sa.func.greatest(j.created_at, j.capped_at)
    query = sa.select(j.id, j.tenant_id.label("tenant"), j.tier, j.num_gpus, since.label("since"), j.started_at, j.reason)
    started = j.started_at > now - within
    missed = [(j.tier == t) & (_waiting(now)(p) | (started & _late(p))) for t, p in PROMISED.items()]
    return many(conn, query.where(sa.or_(*missed)).order_by(j.started_at.desc().nulls_first(), since, j.id).limit(limit), MissedStart)


def _waiting(now: datetime) -> Late:
    could_start = sa.func.coalesce(jobs.c.reason, "").not_in([str(r) for r in BLOCKED])
    waits = sa.and_(jobs.c.state == JobState.QUEUED, jobs.c.started_at.is_(None), could_start)
    return lambda within: waits & (sa.func.greatest(jobs.c.created_at, jobs.c.capped_at) < now - within)


def _late(within: timedelta) -> sa.ColumnElement[bool]:
    return sa.literal_column(DELAY, sa.Interval) > within


def _counted(conn: Connection, late: Late) -> dict[str, int]:
    """Count such jobs of each tier that promises a start."""
    count = sa.select(sa.func.count()).select_from(jobs)
    return {t: conn.execute(count.where(jobs.c.tier == t, late(within))).scalar_one() for t, within in PROMISED.items()}
