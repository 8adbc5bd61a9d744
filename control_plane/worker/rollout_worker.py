"""Keeps the inference servers at the desired state while the API runs: one pass per second, unless another process runs one."""

from __future__ import annotations

import logging
import threading

from control_plane.platform.context import Platform
from control_plane.serving import rollout
from ft_assets.errors import FtError

EVERY_S = 1.0
"""Seconds between two passes: a restarted server gets its adapters back about that long after it answers."""

log = logging.getLogger(__name__)


class ReconcileWorker:
    """A daemon thread. The sensor ``rollout`` does the same every 30 s, in case the API is down."""

    def __init__(self, platform: Platform, *, every_s: float = EVERY_S) -> None:
        self._platform = platform
        self._every_s = every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reconcile", daemon=True)

    def start(self) -> None:
        if self._platform.fleet is not None:
            self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                rollout.reconcile(self._platform)
            except FtError as e:
                log.warning("the inference servers cannot be reconciled: %s", e.message)
            except Exception:
                log.exception("the inference servers cannot be reconciled")
