"""API responses for deletions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from control_plane.platform.epoch_time import epoch_seconds
from control_plane.tenant_data import schemas


def deletion(row: Mapping[Any, Any]) -> schemas.Deletion:
    shown = {name: row[name] for name in ("id", "subject_kind", "subject_id", "reason", "requested_by", "waiting_for")}
    return schemas.Deletion(
        **shown,
        status="in_progress" if row["done_at"] is None else "done",
        requested_at=epoch_seconds(row["requested_at"]),
        done_at=epoch_seconds(row["done_at"]),
        proof=row.get("proof"),
        sha256=row.get("sha256"),
        previous_sha256=row.get("previous_sha256"),
    )
