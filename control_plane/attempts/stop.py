"""The stop of a workload, waited for in a thread: a checkpoint may take half a minute, and its follower goes on following."""

from __future__ import annotations

import threading

from control_plane.platform.protocols import Launcher


class Stopping:
    """A stop that was sent: SIGTERM, and SIGKILL after `grace_s`. Whoever follows may die; a stop that is sent again does no harm."""

    def __init__(self, launcher: Launcher, workload: str, *, grace_s: float) -> None:
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._stop, args=(launcher, workload, grace_s), name=f"stop-{workload}", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what went wrong so far."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Until it is over; raises what went wrong."""
        self._thread.join()
        self.check()

    def _stop(self, launcher: Launcher, workload: str, grace_s: float) -> None:
        try:
            launcher.stop(workload, grace_s=grace_s)
        except Exception as error:  # told to the follower by check()
            self._error = error
