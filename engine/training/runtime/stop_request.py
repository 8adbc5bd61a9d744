"""SIGTERM: noted at any moment, handled at the next point where nothing is lost, and at the latest after 25 s."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

log = logging.getLogger(__name__)

DEADLINE_S = 25.0
"""A spot node is removed 30 s after its notice; evidence must be on disk before that."""
STEP_GRACE_S = 8.0
"""Seconds that a step may take to respond before the last finished one is committed from another thread: leaves 17 s to write it."""


class StopRequest:
    """A request to stop this process.

    Until :meth:`defer` nothing has been trained in this process and the handler calls `leave` immediately; after it, the training loop
    polls :attr:`requested`. A second signal changes nothing.
    """

    def __init__(self, leave: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._leave, self._clock = leave, clock
        self._requested_at: float | None = None
        self._deferred = False
        self._commit: Callable[[], int] | None = None
        self._arrived: int | None = None

    def install(self) -> None:
        """Handles SIGTERM and SIGINT. A Python handler waits for the main thread's current call into torch, a backward pass or a
        collective; signal numbers arrive in a pipe immediately, and :meth:`enforce_deadline` reads it."""
        self._arrived, arriving = os.pipe()
        for end in (self._arrived, arriving):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(arriving, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    @property
    def requested(self) -> bool:
        return self._requested_at is not None

    def defer(self, commit: Callable[[], int] | None = None) -> None:
        """From now on the training loop responds. `commit` saves the last finished step from the calling thread and returns it."""
        self._deferred, self._commit = True, commit

    def enforce_deadline(self, *, grace_s: float = STEP_GRACE_S) -> None:
        """Called by the heartbeat's thread: responds for a training loop that is in a long operation."""
        self._note_arrived()
        if self._requested_at is None:
            return
        waited = self._clock() - self._requested_at
        if not self._deferred:
            if waited > grace_s:  # the handler waits for a call into torch that does not return
                self._leave("asked to stop before the first step")
        elif waited > DEADLINE_S:
            self._leave(f"no checkpoint within {DEADLINE_S:.0f} s of SIGTERM")
        elif waited > grace_s and self._commit is not None:
            commit, self._commit = self._commit, None
            threading.Thread(target=self._commit_and_leave, args=(commit,), name="stop", daemon=True).start()

    def _note_arrived(self) -> None:
        if self._arrived is None or self._requested_at is not None:
            return
        with contextlib.suppress(BlockingIOError):
            if {signal.SIGTERM, signal.SIGINT} & set(os.read(self._arrived, 256)):
                self._requested_at = self._clock()

    def settle(self) -> NoReturn:
        """The training loop cannot continue: waits for the committing thread until the deadline, then leaves."""
        while self._requested_at is not None and self._clock() - self._requested_at <= DEADLINE_S:
            self.enforce_deadline(grace_s=0.0)
            time.sleep(0.1)
        self._leave(f"no checkpoint within {DEADLINE_S:.0f} s of SIGTERM: another rank had left")
        raise SystemExit  # `leave` does not return

    def _commit_and_leave(self, commit: Callable[[], int]) -> None:
        try:
            step = commit()
        except Exception:
            log.exception("the last finished step could not be committed; the training loop tries again")
            return
        self._leave(f"stop requested; step {step} was committed while the next one computed")

    def _on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        if self._requested_at is None:
            self._requested_at = self._clock()
        if not self._deferred:
            self._leave("stop requested before the first step")
