"""Makes exports behind the answers of the API: one at a time, tenants in turn, each in a process of its own.

What another process left undone is made too, and what was kept for long enough is taken away.
"""

from __future__ import annotations

import logging
import threading

from control_plane.adapters import exports
from control_plane.platform.context import Platform
from control_plane.worker.validation_worker import Lane

LOOK_EVERY_S = 30.0
"""Seconds between looks for orders that a process which died left unmade."""

log = logging.getLogger(__name__)


class ExportWorker:
    """Daemon threads: a restart loses nothing, for an order is a row that is found again."""

    def __init__(self, platform: Platform, *, look_every_s: float = LOOK_EVERY_S) -> None:
        self._platform = platform
        self._look_every_s = look_every_s
        self._stopped = threading.Event()
        self._lane = Lane("exports", self._make, at_once=1)
        self._looker = threading.Thread(target=self._look, name="unmade-exports", daemon=True)

    def start(self) -> None:
        self._lane.start()
        self._looker.start()

    def stop(self) -> None:
        self._stopped.set()
        self._lane.stop()

    def enqueue(self, export_id: str, tenant: str) -> threading.Event:
        return self._lane.put(export_id, tenant)

    def _make(self, export_id: str) -> None:
        exports.make(self._platform, export_id)

    def _look(self) -> None:
        while not self._stopped.wait(self._look_every_s):
            try:
                exports.expire(self._platform)
                for row in exports.pending(self._platform):
                    self.enqueue(row.id, row.tenant_id)
            except Exception:
                log.exception("cannot look for exports that are to be made")
