"""Validation of large uploads after their answer, one at a time, and of those that another process left undone.

The bytes are read by a child process (``control_plane.service.isolation``): what it needs of memory, and how it dies, is
not the API's concern.
"""

from __future__ import annotations

import logging
import queue
import threading

from control_plane.service import files
from control_plane.service.platform import Platform
from ft_assets.errors import FtError

LOOK_EVERY_S = 60.0
"""Seconds between looks for uploads that a process which died left unvalidated."""

log = logging.getLogger(__name__)


class ValidationWorker:
    """One daemon thread: a restart loses nothing, for an unvalidated file is a row that is found again."""

    def __init__(self, platform: Platform, *, look_every_s: float = LOOK_EVERY_S) -> None:
        self._platform = platform
        self._look_every_s = look_every_s
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="validation", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Take no further file; one that is being read is left to the next start."""
        self._queue.put(None)

    def enqueue(self, file_id: str) -> None:
        self._queue.put(file_id)

    def _run(self) -> None:
        waiting = self._abandoned()
        while True:
            for file_id in waiting:
                self._validate(file_id)
            try:
                found = self._queue.get(timeout=self._look_every_s)
            except queue.Empty:
                waiting = self._abandoned()
                continue
            if found is None:
                return
            waiting = [found]

    def _abandoned(self) -> list[str]:
        try:
            return files.unvalidated(self._platform)
        except Exception:
            log.exception("cannot look for unvalidated files")
            return []

    def _validate(self, file_id: str) -> None:
        try:
            files.validate(self._platform, file_id, wait=False)
        except FtError as error:
            log.warning("validation of %s waits: %s", file_id, error.message)
        except Exception:
            log.exception("validation of %s failed", file_id)
