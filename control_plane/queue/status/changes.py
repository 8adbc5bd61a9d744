"""A mark of the queue and its nodes: two equal marks mean that pages drawn from them would look the same, apart from the clock."""

from __future__ import annotations

import sqlalchemy as sa

from control_plane.capacity.tables import maintenance, node_drains
from control_plane.jobs.tables import job_events
from control_plane.platform.context import Platform
from control_plane.queue.tables import scheduler_state


def mark(platform: Platform) -> str:
    """Return a mark that changes with each scheduling cycle, event of a job, drained node and maintenance; one query by indexes.

    While a job waits or trains, cycles and events come every few seconds; else the mark stays.
    """
    parts = (
        sa.select(scheduler_state.c.rounds).where(scheduler_state.c.id == 1),
        sa.select(sa.func.max(job_events.c.seq)),
        sa.select(sa.func.hashtext(sa.func.string_agg(sa.cast(node_drains.table_valued(), sa.Text), ""))),
        sa.select(sa.func.hashtext(sa.func.string_agg(sa.cast(maintenance.table_valued(), sa.Text), ""))),
    )
    with platform.whole.engine.connect() as conn:
        found = conn.execute(sa.select(*(part.scalar_subquery() for part in parts))).one()
    return "-".join("" if part is None else str(part) for part in found)
