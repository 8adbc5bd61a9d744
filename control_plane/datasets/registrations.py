"""Validated dataset versions in the order of their registration, each with the file that it came from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from control_plane.datasets.tables import datasets, files
from control_plane.platform.context import Platform
from control_plane.platform.records import many

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
