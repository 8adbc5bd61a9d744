"""Token buckets of the rate limit."""

from __future__ import annotations

import sqlalchemy as sa

from control_plane.platform.tables import metadata

rate_limits = sa.Table(
    "rate_limits", metadata,
    sa.Column("name", sa.Text, primary_key=True),  # id of a key or of an operator, or an address
    sa.Column("full_at", sa.Double, nullable=False),  # seconds since 1970 at which the bucket is full again
    prefixes=["UNLOGGED"],
)  # fmt: skip
