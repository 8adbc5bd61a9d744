"""What waits in the database for a lock."""

from __future__ import annotations

import time

import sqlalchemy as sa

from control_plane.platform.context import Platform

WAITING = sa.text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")


def num_waiting(platform: Platform) -> int:
    """Connections that wait for a lock. Each look is a transaction of its own: within one, PostgreSQL answers the same again."""
    with platform.engine.connect() as conn:
        return int(conn.execute(WAITING).scalar_one())


def wait_for_a_lock(platform: Platform) -> None:
    """Return once a connection waits for a lock."""
    until = time.monotonic() + 20
    while not num_waiting(platform):
        assert time.monotonic() < until, "nothing waits for a lock"
        time.sleep(0.01)
