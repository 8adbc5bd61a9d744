"""The platform as another role of the database than that of its own processes."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from control_plane.platform.context import Actor, Platform


def as_owner(platform: Platform) -> Engine:
    """Connections of the schema's owner, for tests that damage what the platform's own roles cannot. None stays open."""
    return sa.create_engine(platform.settings.database_url, poolclass=sa.NullPool)


def as_operator(platform: Platform) -> Platform:
    """`platform` as `ft admin` opens it."""
    return platform.acting_as(Actor(kind="operator", id="cli:tests"))
