"""Ending an attempt of an export: what follows for the export. The archive is in the object store; the evidence describes it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.adapters import exports
from control_plane.adapters.exporting import orders
from control_plane.adapters.tables import adapters
from control_plane.adapters.tables import exports as rows
from control_plane.attempts.claims import Claim, Ending
from control_plane.attempts.tables import agents, attempts
from control_plane.datasets import orphaned_objects
from control_plane.queue.tables import reservations
from core import layout
from core.storable_text import printable
from core.workload import Kind
from engine.training import Outcome, Retry

MAX_FAILURES = 3
"""Attempts of one export that may fail; what was killed three times (for its memory, say) will be again."""


def archive_key(conn: Connection, held: Claim) -> str:
    """Return the key of the archive that the attempt may write: of this attempt alone, so that none overwrites another's."""
    adapter_id = conn.execute(sa.select(adapters.c.id).where(adapters.c.job_id == held.job_id)).scalar_one()
    return layout.export_key(held.tenant, adapter_id, f"{held.export_id}-a{held.attempt}")


def is_wanted(conn: Connection, export_id: str) -> bool:
    """Whether the export is still needed: not if it was deleted."""
    return orders.is_running(conn, export_id)


def record_stage(conn: Connection, export_id: str, beat: Mapping[str, Any]) -> None:
    """Show what the export's process does."""
    orders.show_progress(conn, export_id, {"stage": printable(beat.get("phase") or ""), "seconds": int(beat.get("seconds") or 0)})


def move(conn: Connection, held: Claim, export_id: str, ending: Ending, now: datetime) -> None:
    """End the export, or have it wait for another attempt, by the first of these that holds.

    1. The export was deleted meanwhile: what the attempt may have stored is removed.
    2. The attempt succeeded: the export is ready.
    3. It may succeed elsewhere and failed fewer than three times, not counting attempts that their node took back: it waits again.
    4. The export has failed, with the reason if another attempt would fail for it too.
    """
    failure = ending.failure
    if not orders.is_running(conn, export_id):
        orphaned_objects.release(conn, held.tenant, [archive_key(conn, held)], now=now)
    elif failure is None:
        evidence = _evidence(conn, held)
        archive = {name: evidence[name] for name in ("bytes", "sha256", "manifest", "manifest_sha256")}
        orders.end(conn, export_id, orders.READY, now=now, object_key=archive_key(conn, held), **archive)
    elif failure.retry is not Retry.NEVER and _failures(conn, held) < MAX_FAILURES:
        orders.return_to_queue(conn, export_id)
    else:
        error = {"code": failure.code, "message": printable(failure.message), "param": None}
        orders.end(
            conn, export_id, orders.FAILED, now=now, error=error if failure.retry is Retry.NEVER else {**error, **exports.BROKEN_ERROR}
        )


def _evidence(conn: Connection, held: Claim) -> Mapping[str, Any]:
    this = (agents.c.job_id == held.job_id) & (agents.c.attempt == held.attempt) & (agents.c.node == 0)
    found: Mapping[str, Any] = conn.execute(sa.select(agents.c.exit).where(this)).scalar_one()["evidence"]
    return found


def _failures(conn: Connection, held: Claim) -> int:
    """Return the ended attempts that count as failures, since the export was last requested."""
    r, a = reservations.c, attempts.c
    query = sa.select(sa.func.count()).join_from(reservations, attempts, (a.job_id == r.job_id) & (a.attempt == r.attempt))
    ordered_at = sa.select(rows.c.created_at).where(rows.c.id == held.export_id).scalar_subquery()
    same = (r.job_id == held.job_id, r.kind == Kind.EXPORT, r.export_id == held.export_id, r.granted_at >= ordered_at)
    return int(conn.execute(query.where(*same, a.ended_at.is_not(None), a.outcome != Outcome.PREEMPTED)).scalar_one())
