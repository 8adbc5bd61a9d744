"""Watches the running attempts in one of the workers; another takes over when it dies."""

from __future__ import annotations

import logging
import select
import threading
import time
from typing import Any

import httpx
import sqlalchemy as sa

from control_plane.attempts.watch import Watcher, logged
from control_plane.platform.context import Platform
from resources.launcher import open_launcher

WATCH_LOCK = 0x66745F77
"""Advisory lock ("ft_w") of the worker that watches."""
LOOK_S = 0.5
"""How late the end of a workload is noticed, whose GPUs others wait for."""
IDLE_LOOK_S = 10.0
"""Between two passes while no attempt holds a reservation and the database announces none (channel ``ft_queue``)."""
END_S = 1.0
"""How late the end of the process is noticed meanwhile."""
TAKE_OVER_S = 2.0
FORGET_EVERY_S = 300.0
"""Between two passes in which the launcher forgets ended workloads."""

log = logging.getLogger(__name__)


def watch(platform: Platform, ending: threading.Event) -> None:
    """Watch until `ending` is set, while no other worker does."""
    while not ending.is_set():
        try:
            _watch_alone(platform, ending)
        except Exception:
            log.exception("the attempts cannot be watched now")
            ending.wait(TAKE_OVER_S)


def _watch_alone(platform: Platform, ending: threading.Event) -> None:
    with platform.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        while not conn.execute(sa.select(sa.func.pg_try_advisory_lock(WATCH_LOCK))).scalar_one():
            if ending.wait(TAKE_OVER_S):
                return
        watcher = Watcher(platform=platform, launcher=open_launcher(platform.settings), answers=lambda: _api_answers(platform))
        try:
            conn.exec_driver_sql("LISTEN ft_queue")
            forgotten_at = -FORGET_EVERY_S
            while not ending.is_set():
                conn.execute(sa.select(1))  # the lock is gone with the connection
                _listening(conn).notifies.clear()
                watcher.look()
                if time.monotonic() - forgotten_at > FORGET_EVERY_S:
                    with logged("ended workloads cannot be listed now"):
                        watcher.forget_ended()
                    forgotten_at = time.monotonic()
                if watcher.is_needed():
                    ending.wait(LOOK_S)
                else:
                    _wait_for_change(conn, ending)
        finally:
            watcher.close()
            conn.invalidate()  # closed, not returned to the pool with the lock


def _wait_for_change(conn: sa.Connection, ending: threading.Event) -> None:
    """Wait until the database announces a change of the queue, at most :data:`IDLE_LOOK_S`."""
    listening, until = _listening(conn), time.monotonic() + IDLE_LOOK_S
    while not ending.is_set() and not listening.notifies and time.monotonic() < until:
        if any(select.select([listening], [], [], END_S)):
            listening.poll()


def _listening(conn: sa.Connection) -> Any:
    """Return the driver's connection, which keeps what was announced in ``notifies``."""
    return conn.connection.driver_connection


def _api_answers(platform: Platform) -> bool:
    """Whether the API takes heartbeats, for which it needs its database and no object store."""
    try:
        return httpx.get(f"{platform.settings.internal_url}/healthz", timeout=3.0, trust_env=False).is_success
    except httpx.HTTPError:
        return False
