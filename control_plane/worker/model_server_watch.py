"""Keeps the servers of whole models and pools in one of the workers.

It does so until it ends: while an installation is upgraded, workers of two versions, which start different servers, never take turns. It
has a thread of its own, because what runs the servers may hang.
"""

from __future__ import annotations

import threading
import time

import sqlalchemy as sa

from control_plane.platform.context import Platform
from control_plane.serving import own_servers
from control_plane.worker.sole_worker import check_lock, run_alone

KEEP_LOCK = 0x66745F6B
"""Advisory lock ("ft_k") of the worker that keeps the servers."""
EVERY_S = 1.0
"""Between two passes while a whole model has a server or is to have one."""
UNASKED_S = 10.0
"""Between two passes otherwise: pools are kept, too."""


def watch(platform: Platform, ending: threading.Event) -> None:
    """Keep the servers until `ending` is set, while no other worker does."""
    run_alone(platform, KEEP_LOCK, ending, lambda conn: _watch(platform, ending, conn), what="the model servers")


def _watch(platform: Platform, ending: threading.Event, conn: sa.Connection) -> None:
    if platform.servers is None:
        own_servers.abandon(platform)
        ending.wait()
    due_at = 0.0
    while not ending.is_set():
        check_lock(conn)
        if time.monotonic() >= due_at or own_servers.is_needed(platform):
            own_servers.keep(platform)
            due_at = time.monotonic() + UNASKED_S
        ending.wait(EVERY_S)
