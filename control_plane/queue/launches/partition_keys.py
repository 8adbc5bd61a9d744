"""Which jobs still have their partition key in Dagster: those that live, and those that ended not long ago.

Dagster's lists slow down with the number of keys (7 s at 100,000); its events and runs of a key stay when the key goes, and
the platform's own tables know every job for ever.

1. The key of a job goes ``FT_PARTITION_DAYS`` after its end.
2. Where more than :data:`MAX_KEYS` are left, those of the jobs that ended first go earlier, but not within :data:`SETTLED`.
3. A job that is being evaluated again has its key until that is over.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.evaluations.tables import evaluations
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.platform.job_states import FINAL

MAX_KEYS = 10_000
"""Listing takes 0.3 s at so many, and ten times as long at ten times as many."""
SETTLED = timedelta(hours=1)
"""After a job's end its last run may still write."""


class Keyed(NamedTuple):
    """A job whose key is to go."""

    tenant: str
    job_id: str


def retirable(platform: Platform, *, limit: int, max_keys: int = MAX_KEYS) -> list[Keyed]:
    """At most `limit` jobs whose keys are to go, the first that ended first."""
    now, after = platform.clock(), timedelta(days=platform.settings.partition_days)
    with platform.engine.connect() as conn:
        due = _ended(conn, now - max(after, SETTLED), limit)
        surplus = _keys(conn) - len(due) - max_keys
        if surplus <= 0 or len(due) == limit:
            return due
        return _ended(conn, now - SETTLED, min(limit, len(due) + surplus))


def retired(platform: Platform, job_ids: Collection[str]) -> None:
    """The keys of these jobs are gone."""
    with platform.engine.begin() as conn:
        conn.execute(sa.update(jobs).where(jobs.c.id.in_(job_ids)).values(partition_retired_at=platform.clock()))


def returned(platform: Platform, job_ids: Collection[str]) -> None:
    """The keys of these jobs are asked for again: a run needs them."""
    this = jobs.c.id.in_(job_ids) & jobs.c.partition_retired_at.is_not(None)
    with platform.engine.begin() as conn:
        conn.execute(sa.update(jobs).where(this).values(partition_retired_at=None))


def _keys(conn: Connection) -> int:
    """Jobs whose key is there, or will be."""
    return int(conn.execute(sa.select(sa.func.count()).where(jobs.c.partition_retired_at.is_(None))).scalar_one())


def _ended(conn: Connection, before: datetime, limit: int) -> list[Keyed]:
    evaluated = sa.exists().where(evaluations.c.job_id == jobs.c.id, evaluations.c.state.in_(("queued", "running")))
    query = (
        sa.select(jobs.c.tenant_id, jobs.c.id)
        .where(
            jobs.c.finished_at < before,
            jobs.c.partition_retired_at.is_(None),
            jobs.c.state.in_([s.value for s in FINAL]),
            ~evaluated,
        )
        .order_by(jobs.c.finished_at, jobs.c.id)
        .limit(limit)
    )
    return [Keyed(r.tenant_id, r.id) for r in conn.execute(query)]
