"""Datasets of the Hugging Face Hub, brought in as files of a tenant: fetched at a pinned revision, stored, then validated as any."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy.engine import RowMapping

from control_plane.service import files
from control_plane.service.platform import Platform
from control_plane.service.tenants import get as get_tenant
from control_plane.settings import Settings
from control_plane.tenants import tier_named
from ft_assets.datasets.policies import Policies
from ft_assets.datasets.readers.containers import MAX_BYTES

if TYPE_CHECKING:
    from ft_assets.datasets.readers.hub import HubFile

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
    Policies.from_request(policies or {})
    scratch = platform.settings.work_dir / "tmp"
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        max_bytes = tier_named(get_tenant(platform, tenant).tier).max_file_bytes
        found = fetched(platform.settings, hub_id, Path(directory), max_bytes=max_bytes)
        with found.path.open("rb") as stream:
            return files.create(
                platform,
                tenant,
                stream,
                filename=found.filename,
                purpose=PURPOSE,
                column_map=column_map,
                policies=policies,
                model=model,
                source=str(found.hub_id),
            )


def fetched(settings: Settings, hub_id: str, directory: Path, *, max_bytes: int = MAX_BYTES) -> HubFile:
    """The rows of `hub_id` as one file in `directory`; an id that pins no commit is refused with the one of today."""
    from ft_assets.datasets.readers import hub

    endpoint, token = settings.hub_endpoint, settings.hub_token or None
    pinned = hub.parse_hub_id(hub_id, endpoint=endpoint, token=token, scratch=directory)
    return hub.fetch(pinned, directory, endpoint=endpoint, token=token, max_bytes=max_bytes)
