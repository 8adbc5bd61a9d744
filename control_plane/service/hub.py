"""Datasets of the Hugging Face Hub, brought in as files of a tenant: fetched at a pinned revision, stored, then validated as any."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlalchemy.engine import RowMapping

from control_plane.service import files
from control_plane.service.platform import Platform
from ft_assets.datasets.policies import Policies

PURPOSE = "fine-tune"


def import_dataset(
    platform: Platform,
    tenant: str,
    *,
    hub_id: str,
    column_map: Mapping[str, str] | None = None,
    policies: Mapping[str, Any] | None = None,
    model: str | None = None,
) -> RowMapping:
    """A file with the rows of `hub_id`; the caller sees to its validation where it is still ``uploaded``."""
    from ft_assets.datasets.readers import hub

    Policies.from_request(policies or {})
    scratch = platform.settings.work_dir / "tmp"
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        path = hub.fetch(hub_id, Path(directory), endpoint=platform.settings.hub_endpoint, token=platform.settings.hub_token or None)
        with path.open("rb") as stream:
            return files.create(
                platform,
                tenant,
                stream,
                filename=path.name,
                purpose=PURPOSE,
                column_map=column_map,
                policies=policies,
                model=model,
                source=hub_id,
            )
