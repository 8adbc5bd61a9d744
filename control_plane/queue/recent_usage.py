"""What tenants used lately: what their fair share is held against."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timedelta
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.pool import Pool

from control_plane.jobs.tables import jobs
from control_plane.queue.tables import reservations

WINDOW = timedelta(hours=24)
"""A day: who trains each evening is measured by the evening before."""
HALF_LIFE_S = 6 * 3600.0
"""A quarter of the window: what left it counted for a sixteenth, so nobody's share jumps when a job leaves it."""
SEEN_FOR = timedelta(seconds=10)
"""It is asked each round, and in ten seconds a decayed day changes by less than a thousandth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    at: datetime
    used: dict[str, float]


_SEEN: WeakKeyDictionary[Pool, _Seen] = WeakKeyDictionary()
"""By database: its connections' pool."""


def recent_use(conn: Connection, now: datetime) -> dict[str, float]:
    """GPU-seconds held by each tenant within :data:`WINDOW`; those of :data:`HALF_LIFE_S` ago count half."""
    seen = _SEEN.get(conn.engine.pool)
    if seen is None or not timedelta(0) <= now - seen.at < SEEN_FOR:
        seen = _SEEN[conn.engine.pool] = _Seen(at=now, used=_summed(conn, now))
    return seen.used


def _summed(conn: Connection, now: datetime) -> dict[str, float]:
    tau = HALF_LIFE_S / math.log(2.0)
    moment = sa.literal(now, sa.DateTime(timezone=True))

    def weight(at: sa.ColumnElement[datetime]) -> sa.ColumnElement[float]:
        ago_s = sa.cast(sa.func.extract("epoch", moment - sa.func.least(at, moment)), sa.Float)
        return sa.func.exp(-ago_s / tau)

    begins = sa.func.greatest(reservations.c.granted_at, moment - WINDOW)
    held = reservations.c.num_gpus * tau * (weight(sa.func.coalesce(reservations.c.released_at, moment)) - weight(begins))
    recent = sa.or_(reservations.c.released_at.is_(None), reservations.c.released_at > now - WINDOW)
    query = (
        sa.select(jobs.c.tenant_id, sa.func.sum(held))
        .join(jobs, jobs.c.id == reservations.c.job_id)
        .where(recent)
        .group_by(jobs.c.tenant_id)
    )
    return {tenant: float(seconds) for tenant, seconds in conn.execute(query) if seconds > 0}
