"""SIGTERM: noted at any moment, answered at the next point where nothing is lost, and at the latest after 25 s."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType

DEADLINE_S = 25.0
"""A spot node is gone 30 s after its notice; evidence must be on disk before that."""


class StopRequest:
    """Whether somebody asked this process to stop.

    Until :meth:`defer` nothing has been trained in this process and the handler leaves at once through `leave`; after it,
    the training loop polls :attr:`requested`. A second signal changes nothing.
    """

    def __init__(self, leave: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._leave, self._clock = leave, clock
        self._requested_at: float | None = None
        self._deferred = False

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    @property
    def requested(self) -> bool:
        return self._requested_at is not None

    def defer(self) -> None:
        """From now on the training loop answers."""
        self._deferred = True

    def enforce_deadline(self) -> None:
        """Leave, if the training loop did not answer in time: a step or a save takes longer than the notice."""
        if self._deferred and self._requested_at is not None and self._clock() - self._requested_at > DEADLINE_S:
            self._leave(f"no checkpoint within {DEADLINE_S:.0f} s of SIGTERM")

    def _on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        if self._requested_at is None:
            self._requested_at = self._clock()
        if not self._deferred:
            self._leave("asked to stop before the first step")
