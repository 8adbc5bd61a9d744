"""The rows of a dataset version on this machine: fetched once, kept beside the packs."""

from __future__ import annotations

from pathlib import Path

from control_plane.platform.context import Platform
from ft_assets import layout


def rows_file(platform: Platform, tenant: str, dataset_id: str) -> Path:
    """``rows.parquet`` of the dataset in this machine's cache; it never changes, so it is fetched once."""
    target = platform.settings.work_dir / "datasets" / layout.checked_id(tenant) / layout.checked_id(dataset_id) / "rows.parquet"
    if not target.exists():
        platform.objects.get_file(f"{layout.dataset_prefix(tenant, dataset_id)}/rows.parquet", target)
    return target
