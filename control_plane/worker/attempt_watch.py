"""Watches the running attempts in one of the workers; another takes over when it dies."""

from __future__ import annotations

import select
import threading
import time
from typing import Any

import httpx
import sqlalchemy as sa

from control_plane.attempts.watch import Watcher, logged
from control_plane.platform.context import Platform
from control_plane.worker.sole_worker import check_lock, run_alone
from resources.launcher import open_launcher

WATCH_LOCK = 0x66745F77
"""Advisory lock ("ft_w") of the worker that watches."""
LOOK_S = 0.5
"""How late the end of a workload is noticed, whose GPUs others wait for."""
IDLE_LOOK_S = 10.0
"""Between two passes while no attempt holds a reservation and the database announces none (channel ``ft_queue``)."""
END_S = 1.0
"""How late the end of the process is noticed meanwhile."""
FORGET_EVERY_S = 300.0
"""Between two passes in which the launcher forgets ended workloads."""


def watch(platform: Platform, ending: threading.Event) -> None:
    """Watch until `ending` is set, while no other worker does."""
    run_alone(platform, WATCH_LOCK, ending, lambda conn: _watch(platform, ending, conn), what="the attempts")


def _watch(platform: Platform, ending: threading.Event, conn: sa.Connection) -> None:
    watcher = Watcher(platform=platform, launcher=open_launcher(platform.settings), answers=lambda: _api_answers(platform))
    try:
        conn.exec_driver_sql("LISTEN ft_queue")
        forgotten_at = -FORGET_EVERY_S
        while not ending.is_set():
            check_lock(conn)
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
