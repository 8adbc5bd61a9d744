"""Drained nodes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from control_plane.platform.tables import metadata, timestamp

node_drains = sa.Table(
    "node_drains", metadata,
    sa.Column("node", sa.Text, primary_key=True),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("drained_by", sa.Text, nullable=False),  # the operator's key, or the machine's user
    timestamp("drained_at"),
)  # fmt: skip
"""Nodes on which nothing new is placed; what runs there continues."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drain:
    node: str
    reason: str
    drained_by: str
    drained_at: datetime
