"""API responses for files, datasets and contamination lists."""

from __future__ import annotations

from control_plane.datasets import schemas
from control_plane.datasets.tables import Dataset, File
from control_plane.datasets.validation_state import progress_of
from control_plane.jobs import results
from engine.data import contamination


def file(of: File) -> schemas.File:
    has_report = of.status != "uploaded" and of.purpose != results.PURPOSE
    return schemas.File.of(of, report_url=f"/v1/datasets/{of.id}/report" if has_report else None, progress=progress_of(of))


def file_event(of: File) -> schemas.FileEvent:
    return schemas.FileEvent.of(of, file_id=of.id, progress=progress_of(of))


def dataset(of: Dataset) -> schemas.Dataset:
    stats = of.stats or {}
    tokens, repeated = stats.get("tokens"), contamination(stats)
    return schemas.Dataset.of(
        of,
        token_count=tokens["total"] if tokens else None,
        dedup_removed=stats.get("dedup_removed") or 0,
        contamination_flagged=repeated.flagged,
        contamination_suites=list(repeated.checked),
        report_url=f"/v1/datasets/{of.id}/report",
    )
