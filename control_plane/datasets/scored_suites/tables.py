"""Versions of scored suites."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from control_plane.platform.tables import metadata, owner, timestamp

scored_suites = sa.Table(
    "scored_suites", metadata,
    sa.Column("id", sa.Text, primary_key=True),  # of one version
    owner(),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("metric", sa.Text, nullable=False),  # "reward" of a grader
    sa.Column("grader", JSONB),
    sa.Column("max_drop", sa.Double, nullable=False),
    sa.Column("min_score", sa.Double),
    sa.Column("num_items", sa.Integer, nullable=False),
    sa.Column("sha256", sa.Text, nullable=False),  # of its items
    sa.Column("object_key", sa.Text, nullable=False),
    timestamp("created_at"),
    sa.UniqueConstraint("tenant_id", "name", "version"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredSuite:
    """A version of a tenant's scored suite."""

    id: str
    tenant_id: str
    name: str
    version: int
    metric: str
    grader: Mapping[str, Any] | None
    max_drop: float
    min_score: float | None
    num_items: int
    sha256: str
    object_key: str
    created_at: datetime

    @property
    def reference(self) -> str:
        return f"{self.name}@{self.version}"
