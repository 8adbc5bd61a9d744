"""API responses for adapters, their lineage and exports."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from control_plane.adapters import schemas, service
from control_plane.adapters.tables import Export
from control_plane.jobs import schemas as jobs_schemas
from control_plane.platform.epoch_time import epoch_seconds


def adapter(found: service.Adapter) -> schemas.Adapter:
    times = {name: epoch_seconds(found[name]) for name in ("created_at", "promoted_at", "deprecated_at", "archived_at", "approved_at")}
    return schemas.Adapter.model_validate({name: found[name] for name in schemas.Adapter.model_fields if name in found} | times)


def lineage(found: Mapping[str, Any]) -> schemas.Lineage:
    return schemas.Lineage.model_validate(_plain(found))


def _plain(value: Any) -> Any:
    """Convert all times to seconds, at any depth."""
    if isinstance(value, datetime):
        return epoch_seconds(value)
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def export(of: Export) -> schemas.Export:
    return schemas.Export(
        id=of.id, adapter_id=of.adapter_id, format=of.format, precision=of.precision, status=of.status, progress=of.progress,
        bytes=of.bytes, sha256=of.sha256, manifest=of.manifest, error=jobs_schemas.JobError(**of.error) if of.error else None,
        content_url=f"/v1/adapters/{of.adapter_id}/exports/{of.id}/content" if of.status == "ready" else None,
        created_at=epoch_seconds(of.created_at), finished_at=epoch_seconds(of.finished_at),
    )  # fmt: skip
