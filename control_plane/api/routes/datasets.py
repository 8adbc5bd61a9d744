"""``/v1/datasets``: validation reports."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from control_plane.api.deps import PlatformDep, Reader
from control_plane.service import datasets

router = APIRouter(prefix="/v1/datasets", tags=["datasets"])


@router.get("/{dataset_id}/report")
def report(platform: PlatformDep, tenant: Reader, dataset_id: str) -> dict[str, Any]:
    """The report of a dataset version, or of a file by its id: a refused file has a report, too."""
    return dict(datasets.report(platform, tenant, dataset_id))
