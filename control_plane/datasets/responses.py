"""API responses for files, datasets and suites."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sqlalchemy.engine import RowMapping

from control_plane.datasets import schemas, suites
from control_plane.datasets.tables import File
from control_plane.datasets.validation_state import progress_of
from control_plane.jobs import results
from control_plane.platform.epoch_time import epoch_seconds
from ft_assets.datasets.checks.contamination.contaminated_rows import contamination


def file(of: File) -> schemas.File:
    has_report = of.status != "uploaded" and of.purpose != results.PURPOSE
    return schemas.File(
        id=of.id, bytes=of.bytes, created_at=epoch_seconds(of.created_at), expires_at=epoch_seconds(of.expires_at), filename=of.filename,
        purpose=of.purpose, status=of.status, status_details=of.status_details, sha256=of.sha256, dataset_id=of.dataset_id,
        report_url=f"/v1/datasets/{of.id}/report" if has_report else None, status_code=of.status_code, policies=of.policies,
        model=of.model, source=of.source, progress=_progress(of),
    )  # fmt: skip


def file_event(of: File) -> schemas.FileEvent:
    return schemas.FileEvent(
        file_id=of.id, status=of.status, status_details=of.status_details, dataset_id=of.dataset_id, progress=_progress(of)
    )


def _progress(of: File) -> schemas.Progress | None:
    found = progress_of(of)
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
        contamination_flagged=contamination(stats).flagged,
        contamination_suites=list(contamination(stats).checked),
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
