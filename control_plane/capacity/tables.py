"""Drained nodes, the health of GPUs, and maintenance."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from control_plane.platform.tables import metadata, timestamp

node_drains = sa.Table(
    "node_drains", metadata,
    sa.Column("node", sa.Text, primary_key=True),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("drained_by", sa.Text, nullable=False),  # the operator's key, the machine's user, or the platform
    timestamp("drained_at"),
    timestamp("stop_at", nullable=True),  # when its jobs are to have left it; null: they run to their end
)  # fmt: skip
"""Nodes on which nothing new is placed."""

node_health = sa.Table(
    "node_health", metadata,
    sa.Column("node", sa.Text, primary_key=True),
    sa.Column("errors", JSONB, nullable=False, server_default="{}"),  # {"GPU: metric": last value}
    timestamp("read_at", nullable=True),  # when its GPUs were last read
    timestamp("undrained_at", nullable=True),  # failures before this no longer count against it
)  # fmt: skip

PLATFORM = "platform"
"""Scope of a maintenance of everything."""

maintenance = sa.Table(
    "maintenance", metadata,
    sa.Column("scope", sa.Text, primary_key=True),  # platform | pool:NAME | tenant:ID
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("started_by", sa.Text, nullable=False),  # the machine's user
    timestamp("started_at"),
    timestamp("stop_at", nullable=True),  # when no job runs any more; null: running jobs finish
)  # fmt: skip
"""Parts of the platform in which no job is started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drain:
    node: str
    reason: str
    drained_by: str
    drained_at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class Maintenance:
    scope: str
    message: str
    started_by: str
    started_at: datetime
    stop_at: datetime | None

    @property
    def words(self) -> str:
        """What is closed, since when and why, for tenants."""
        kind, _, name = self.scope.partition(":")
        place = "the platform" if kind == PLATFORM else f"{kind} {name}"
        return f"{place} is under maintenance since {self.started_at:%Y-%m-%d %H:%M} UTC: {self.message}"
