"""``python -m benchmarks.api.scheduler``: what a scheduler does to the database, until SIGTERM.

It runs a scheduling cycle and reads which runs are due after each change of the queue and every five seconds, as
:mod:`sensors.queue_listener` does, but requests no runs: there is no Dagster.
"""

from __future__ import annotations

import signal
import sys
import threading
import time

from control_plane.composition import open_platform
from control_plane.platform.settings import load
from control_plane.queue.cycle import run_cycle
from control_plane.queue.launches import due_runs
from sensors.queue_listener import OPEN_LOOK_S, STAGES, listen


def main() -> None:
    due_at = 0.0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    platform = open_platform(load())

    def look() -> None:
        nonlocal due_at
        run_cycle(platform)
        due_runs(platform, STAGES)
        due_at = time.monotonic() + OPEN_LOOK_S

    listen(platform.engine.url, look, threading.Event(), lambda: time.monotonic() >= due_at)


if __name__ == "__main__":
    main()
