"""Sends webhooks and e-mails while the API runs: rounds twice a second, together with every other process that does."""

from __future__ import annotations

import logging
import threading

from control_plane.notifications.dispatch import BETWEEN_ROUNDS_S, Dispatcher
from control_plane.platform.context import Platform
from ft_assets.errors import FtError

EVERY_S = 0.5
"""Seconds between two rounds: about how long an event takes to its receiver."""

log = logging.getLogger(__name__)


class DispatchWorker:
    """A daemon thread. The sensor ``outbox`` does the same every 30 s, for when the API is away."""

    def __init__(self, platform: Platform, *, every_s: float = EVERY_S) -> None:
        self._platform = platform
        self._dispatcher = Dispatcher(platform)
        self._every_s = every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dispatch", daemon=True)

    def start(self) -> None:
        if self._platform.webhooks is not None or self._platform.mailer is not None:
            self._thread.start()

    def stop(self) -> None:
        """Begin nothing further; what is on its way has a moment to end, and is sent again by another process if it does not."""
        self._stopped.set()
        self._dispatcher.wake()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._dispatcher.wait(2)

    def _run(self) -> None:
        while not self._stopped.is_set():
            begun = 0
            try:
                begun = self._dispatcher.round()
            except FtError as e:
                log.warning("webhooks and e-mails cannot be sent: %s", e.message)
            except Exception:
                log.exception("webhooks and e-mails cannot be sent")
            if not self._stopped.is_set():
                self._dispatcher.pause(BETWEEN_ROUNDS_S if begun else self._every_s)
