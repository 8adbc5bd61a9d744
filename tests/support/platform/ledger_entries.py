"""Entries in the ledger of a test's platform."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy.engine import Connection

from control_plane.billing import ledger
from control_plane.billing.rules import Entry


def enter(
    conn: Connection,
    tenant: str,
    job_id: str,
    *,
    amount_micros: int,
    kind: str = "usage",
    gpu_type: str = "local",
    gpu_seconds: float = 1.0,
    occurred_at: datetime | None = None,
    detail: Mapping[str, Any] | None = None,
) -> None:
    """What the first attempt of a job cost."""
    now = datetime.now(UTC)
    entry = Entry(
        id=f"{job_id}/a1/{kind}", kind=kind, amount_micros=amount_micros, list_micros=amount_micros, occurred_at=occurred_at or now,
        job_id=job_id, attempt=1, gpu_type=gpu_type, pricing="on_demand", gpu_seconds=gpu_seconds, detail=detail or {},
    )  # fmt: skip
    assert ledger.post(conn, tenant, entry, now=now)
