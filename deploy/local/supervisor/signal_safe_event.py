"""An event that a signal handler may set."""

from __future__ import annotations

from queue import Empty, SimpleQueue


class SignalSafeEvent:
    """Wakes a waiting thread; safe to set from a signal handler.

    ``threading.Event`` is not: a handler that interrupts ``Event.set`` and calls it waits forever for a lock that its own thread holds.
    ``SimpleQueue.put`` is reentrant.
    """

    def __init__(self) -> None:
        self._set: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        self._set.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Return whether it was set since the last wait, or is within the time; clears it."""
        try:
            self._set.get(timeout=timeout_s)
        except Empty:
            return False
        for _ in range(self._set.qsize()):
            self._set.get()
        return True
