"""State of mirrors in other registries."""

from __future__ import annotations

import sqlalchemy as sa

from control_plane.platform.tables import metadata, timestamp

mirrors = sa.Table(
    "mirrors", metadata,
    sa.Column("name", sa.Text, primary_key=True),  # mlflow
    sa.Column("digest", sa.Text, nullable=False),  # of what was mirrored last
    timestamp("mirrored_at"),
    sa.Column("error", sa.Text),  # why the last attempt failed
    timestamp("failed_at", nullable=True),
)  # fmt: skip
