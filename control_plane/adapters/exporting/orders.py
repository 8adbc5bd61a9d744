"""Rows of exports as others than their makers see them: the queue that gives devices, attempts that end, the worker that starts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.adapters.tables import Export, exports
from control_plane.platform.records import many
from control_plane.platform.task_queue import defer

EXPORT, EXPORTS, STARTS = "export", "exports", "export_starts"
"""The task, and its queues: for exports that the worker makes, in turns of tenants, and for starts of workloads, which hold devices."""
QUEUED, RUNNING, READY, FAILED = "queued", "running", "ready", "failed"


def add_task(conn: Connection, order: Export, *, once: str | None = None) -> None:
    """Add the task that makes an export, or starts its workload; `once`: unless a task of that key waits."""
    has_device = order.expected_s is not None
    queue, turn = (STARTS, f"{STARTS}:{order.id}") if has_device else (EXPORTS, f"{EXPORTS}:{order.tenant_id}")
    defer(conn, EXPORT, queue=queue, turn=turn, once=once, export_id=order.id, tenant=order.tenant_id)


def begin(conn: Connection, export_ids: Sequence[str], now: datetime) -> set[str]:
    """Mark orders that get a device as running, and add the tasks that start their workloads; returns their jobs."""
    if not export_ids:
        return set()
    this = exports.c.id.in_(export_ids) & (exports.c.status == QUEUED)
    begun = many(conn, sa.update(exports).where(this).values(status=RUNNING, beat_at=now).returning(exports), Export)
    for order in begun:
        add_task(conn, order)
    return {order.job_id for order in begun}


def is_running(conn: Connection, export_id: str) -> bool:
    """Whether the export is being made; holds its row, so that a deletion waits for the end of the transaction."""
    return conn.execute(sa.select(exports.c.status).where(exports.c.id == export_id).with_for_update()).scalar() == RUNNING


def show_progress(conn: Connection, export_id: str, progress: Mapping[str, Any]) -> None:
    """Record the stage of a running export."""
    running = (exports.c.id == export_id) & (exports.c.status == RUNNING)
    conn.execute(sa.update(exports).where(running).values(progress=dict(progress), beat_at=sa.func.clock_timestamp()))


def return_to_queue(conn: Connection, export_id: str) -> None:
    """Have an export wait for another device, because its attempt failed."""
    running = (exports.c.id == export_id) & (exports.c.status == RUNNING)
    conn.execute(sa.update(exports).where(running).values(status=QUEUED, progress=sa.null()))


def end(conn: Connection, export_id: str, status: str, *, now: datetime, **columns: Any) -> None:
    """Write the end of a running export."""
    running = (exports.c.id == export_id) & (exports.c.status == RUNNING)
    values = {"status": status, "progress": sa.null(), "error": sa.null(), "finished_at": now, **columns}
    conn.execute(sa.update(exports).where(running).values(values))
