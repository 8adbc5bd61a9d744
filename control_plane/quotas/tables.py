"""GPU time held for admitted jobs, and notices sent about quotas."""

from __future__ import annotations

import sqlalchemy as sa

from control_plane.platform.tables import metadata, owner, timestamp

quota_holds = sa.Table(
    "quota_holds", metadata,
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id"), primary_key=True),
    owner(),
    sa.Column("gpu_seconds", sa.Float, nullable=False),  # what the whole job is expected to take
    sa.Column("counted", sa.Boolean, nullable=False),  # from counted tokens; else a first estimate, made before the data was read
    timestamp("created_at"), timestamp("released_at", nullable=True),
    sa.Index("ix_quota_holds_open", "tenant_id", postgresql_where=sa.text("released_at IS NULL")),
)  # fmt: skip
"""GPU time that admitted jobs will take: what is left of a month is its cap less what was used and what is held here."""

quota_notices = sa.Table(
    "quota_notices", metadata,
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), primary_key=True),
    sa.Column("month", sa.Text, primary_key=True),  # yyyy-mm, UTC
    sa.Column("quota", sa.Text, primary_key=True),  # soft | hard
    sa.Column("percent", sa.Integer, primary_key=True),
    sa.Column("gpu_hours", sa.Float, primary_key=True),  # the whole limit: another limit is told of anew
    timestamp("created_at"),
)  # fmt: skip
"""What a tenant was told of its GPU-hours: once each."""
