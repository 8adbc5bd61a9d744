"""Reports validated dataset versions to Dagster: the API and the worker validate uploads, so no run does."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import dagster as dg
import sqlalchemy as sa

from control_plane.datasets.tables import datasets, files
from control_plane.platform.context import Platform
from control_plane.platform.records import many
from engine.data import DatasetReport
from ft_assets.datasets.assets import validated_dataset
from ft_assets.partitions import DATASETS, partition_key
from ft_assets.platform_resource import PlatformResource

SETTLED = timedelta(seconds=30)
"""Versions younger than this wait: an earlier one may still be uncommitted. A statement takes 30 s at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisteredDataset:
    tenant_id: str
    id: str
    name: str
    version: int
    format: str
    content_sha256: str
    row_count: int
    uri: str
    report: Mapping[str, Any]
    created_at: datetime
    file_id: str | None
    """First file with this content; None: its record is gone."""
    filename: str | None
    bytes: int | None
    sha256: str | None
    """Digest of the file as uploaded."""

    @property
    def position(self) -> str:
        """What :func:`registered` continues after."""
        return json.dumps([self.created_at.isoformat(), self.tenant_id, self.id])


def registered(platform: Platform, *, after: str | None, limit: int = 100) -> Sequence[RegisteredDataset]:
    """Return the versions registered after the position `after` (None: all), oldest first; without those whose data was erased."""
    order = (datasets.c.created_at, datasets.c.tenant_id, datasets.c.id)
    shown = [c for c in datasets.c if c.name in RegisteredDataset.__dataclass_fields__]
    first = (
        sa.select(files.c.id.label("file_id"), files.c.filename, files.c.bytes, files.c.sha256)
        .where(files.c.tenant_id == datasets.c.tenant_id, files.c.dataset_id == datasets.c.id)
        .order_by(files.c.created_at, files.c.id)
        .limit(1)
        .lateral()
    )
    query = (
        sa.select(*shown, *first.c)
        .join(first, sa.true(), isouter=True)
        .where(datasets.c.created_at <= platform.clock() - SETTLED, datasets.c.report["erased"].astext.is_distinct_from("true"))
        .order_by(*order)
        .limit(limit)
    )
    if after is not None:
        at, tenant, id_ = json.loads(after)
        query = query.where(sa.tuple_(*order) > sa.tuple_(sa.literal(datetime.fromisoformat(at)), tenant, id_))
    with platform.engine.connect() as conn:
        return many(conn, query, RegisteredDataset)


@dg.sensor(minimum_interval_seconds=30, default_status=dg.DefaultSensorStatus.RUNNING)
def validated_datasets(context: dg.SensorEvaluationContext, platform: PlatformResource) -> dg.SensorResult | dg.SkipReason:
    """Reports each version once, about a minute after its validation; the cursor is the last reported one."""
    opened = platform.get()
    found = registered(opened, after=context.cursor)
    if not found:
        return dg.SkipReason("no dataset was validated")
    keys = [partition_key(version.tenant_id, version.id) for version in found]
    return dg.SensorResult(
        asset_events=[_materialization(version, key, api=opened.settings.public_url) for version, key in zip(found, keys, strict=True)],
        dynamic_partitions_requests=[DATASETS.build_add_request(keys)],
        cursor=found[-1].position,
    )


def _materialization(version: RegisteredDataset, key: str, *, api: str) -> dg.AssetMaterialization:
    counted = version.report["stats"].get("tokens")
    shown = {name: getattr(version, name) for name in ("file_id", "filename", "bytes", "sha256", "name", "version", "format")}
    return dg.AssetMaterialization(
        asset_key=validated_dataset.key,
        partition=key,
        tags={"dagster/data_version": version.content_sha256},
        metadata={
            **{name: value for name, value in shown.items() if value is not None},
            "rows": version.row_count,
            **({"tokens": counted["total"]} if counted else {}),
            "findings": [f"{w['code']}: {w['message']}" for w in version.report["warnings"]],
            "report": dg.MetadataValue.md(DatasetReport.from_dict(version.report).to_markdown()),
            "api": dg.MetadataValue.url(f"{api}/v1/datasets/{version.id}/report"),
            "uri": dg.MetadataValue.path(version.uri),
            "validated_at": dg.MetadataValue.timestamp(version.created_at),
        },
    )
