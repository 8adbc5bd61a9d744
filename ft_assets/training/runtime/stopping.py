"""SIGTERM: noted at any moment, answered at the next point where nothing is lost, and at the latest after 25 s."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

DEADLINE_S = 25.0
"""A spot node is gone 30 s after its notice; evidence must be on disk before that."""
PATIENCE_S = 8.0
"""How long a step may take to answer before the last finished one is committed from another thread: leaves 17 s to write it."""


class StopRequest:
    """Whether somebody asked this process to stop.

    Until :meth:`defer` nothing has been trained in this process and the handler leaves at once through `leave`; after it,
    the training loop polls :attr:`requested`. A second signal changes nothing.
    """

    def __init__(self, leave: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._leave, self._clock = leave, clock
        self._requested_at: float | None = None
        self._deferred = False
        self._commit: Callable[[], int] | None = None

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    @property
    def requested(self) -> bool:
        return self._requested_at is not None

    def defer(self, commit: Callable[[], int] | None = None) -> None:
        """From now on the training loop answers. `commit` saves the last finished step from the thread that calls it, and says which."""
        self._deferred, self._commit = True, commit

    def enforce_deadline(self) -> None:
        """Called by the heartbeat's thread: answer for a training loop that is in the middle of something long."""
        if not self._deferred or self._requested_at is None:
            return
        waited = self._clock() - self._requested_at
        if waited > DEADLINE_S:
            self._leave(f"no checkpoint within {DEADLINE_S:.0f} s of SIGTERM")
        elif waited > PATIENCE_S and self._commit is not None:
            commit, self._commit = self._commit, None
            threading.Thread(target=self._commit_and_leave, args=(commit,), name="stop", daemon=True).start()

    def _commit_and_leave(self, commit: Callable[[], int]) -> None:
        self._leave(f"asked to stop; step {commit()} was committed while the next one computed")

    def _on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        if self._requested_at is None:
            self._requested_at = self._clock()
        if not self._deferred:
            self._leave("asked to stop before the first step")
