"""Work that one of the workers does for as long as it lives; another takes over when it ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import sqlalchemy as sa

from control_plane.platform.context import Platform

TAKE_OVER_S = 2.0

log = logging.getLogger(__name__)


def run_alone(platform: Platform, key: int, ending: threading.Event, work: Callable[[sa.Connection], None], *, what: str) -> None:
    """Watch `what` by `work` until `ending` is set, while no other worker does; an error is logged, and one of the workers begins again.

    `work` gets the connection that holds the advisory lock `key`, and calls :func:`check_lock` before each pass.
    """
    while not ending.is_set():
        try:
            with platform.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
                _with_lock(conn, key, ending, work)
        except Exception:
            log.exception("%s cannot be watched now", what)
            ending.wait(TAKE_OVER_S)


def check_lock(conn: sa.Connection) -> None:
    """Raise if the connection is gone, and the lock with it."""
    conn.execute(sa.select(1))


def _with_lock(conn: sa.Connection, key: int, ending: threading.Event, work: Callable[[sa.Connection], None]) -> None:
    while not conn.scalar(sa.select(sa.func.pg_try_advisory_lock(key))):
        if ending.wait(TAKE_OVER_S):
            return
    try:
        work(conn)
    finally:
        conn.invalidate()  # closed, not returned to the pool with the lock
