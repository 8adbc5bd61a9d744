"""API responses for files, datasets and suites."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sqlalchemy.engine import RowMapping

from control_plane.datasets import schemas, suites
from control_plane.datasets.validation_state import progress_of
from control_plane.jobs import results
from control_plane.platform.epoch_time import epoch_seconds
from ft_assets.datasets.checks.contamination.contaminated_rows import contamination


def file(row: RowMapping) -> schemas.File:
    return schemas.File(
        id=row["id"],
        bytes=row["bytes"],
        created_at=epoch_seconds(row["created_at"]),
        expires_at=epoch_seconds(row["expires_at"]),
        filename=row["filename"],
        purpose=row["purpose"],
        status=row["status"],
        status_details=row["status_details"],
        sha256=row["sha256"],
        dataset_id=row["dataset_id"],
        report_url=None if row["status"] == "uploaded" or row["purpose"] == results.PURPOSE else f"/v1/datasets/{row['id']}/report",
        status_code=row["status_code"],
        policies=row["policies"],
        model=row["model"],
        source=row["source"],
        progress=_progress(row),
    )


def file_event(row: RowMapping) -> schemas.FileEvent:
    return schemas.FileEvent(
        file_id=row["id"],
        status=row["status"],
        status_details=row["status_details"],
        dataset_id=row["dataset_id"],
        progress=_progress(row),
    )


def _progress(row: RowMapping) -> schemas.Progress | None:
    found = progress_of(row)
    return None if found is None else schemas.Progress(**asdict(found))


def dataset(row: RowMapping) -> schemas.Dataset:
    stats = row["stats"] or {}
    tokens = stats.get("tokens")
    return schemas.Dataset(
        id=row["id"],
        name=row["name"],
        version=row["version"],
        format=row["format"],
        row_count=row["row_count"],
        token_count=tokens["total"] if tokens else None,
        dedup_removed=stats.get("dedup_removed") or 0,
        contamination_flagged=contamination(stats)["flagged"],
        contamination_suites=contamination(stats)["checked"],
        uri=row["uri"],
        review=row["review"],
        approved_at=epoch_seconds(row["approved_at"]),
        approved_by=row["approved_by"],
        report_url=f"/v1/datasets/{row['id']}/report",
        created_at=epoch_seconds(row["created_at"]),
    )


def suite(row: Mapping[Any, Any]) -> schemas.Suite:
    shown = {name: row[name] for name in ("id", "name", "field", "num_items", "sha256")}
    return schemas.Suite(**shown, owner=suites.owner(row), created_at=epoch_seconds(row["created_at"]))
