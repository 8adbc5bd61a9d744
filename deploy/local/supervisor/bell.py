"""Wakes a thread that waits; handlers of signals may do it."""

from __future__ import annotations

from queue import Empty, SimpleQueue


class Bell:
    """A ``threading.Event`` that handlers of signals may set. A handler that interrupts ``Event.set`` and calls it waits forever for a lock
    that its own thread holds; ``SimpleQueue.put`` may be interrupted by itself."""

    def __init__(self) -> None:
        self._rings: SimpleQueue[None] = SimpleQueue()

    def ring(self) -> None:
        self._rings.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Return whether it rang since the last wait, or does within the time."""
        try:
            self._rings.get(timeout=timeout_s)
        except Empty:
            return False
        for _ in range(self._rings.qsize()):
            self._rings.get()
        return True
