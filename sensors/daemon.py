"""``python -m sensors.daemon ARGUMENT...``: Dagster's daemon, with the queue listener in a thread.

They share a process because neither is of use alone: what the listener launches waits for the daemon's run queue. If the listener fails,
the daemon's sensors do its work.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys
import threading

from control_plane.composition import open_platform
from control_plane.platform.settings import load
from core.telemetry import logs, spans
from sensors import queue_listener

SERVICE = "ft-queue-listener"
END_S = 5.0
"""Time for a cycle in progress at the end of the process."""

log = logging.getLogger(__name__)


def main() -> None:
    logs.configure_packages(SERVICE)
    spans.configure(SERVICE)
    ending = threading.Event()
    listener = threading.Thread(target=_listen, args=(ending,), name=queue_listener.LISTENER, daemon=True)
    listener.start()
    sys.argv[0] = "dagster-daemon"
    try:
        runpy.run_module("dagster._daemon", run_name="__main__")
    finally:
        ending.set()
        listener.join(END_S)


def _listen(ending: threading.Event) -> None:
    settings = load()
    url = os.environ.get("FT_DAGSTER_URL") or f"http://127.0.0.1:{settings.dagster_port}"
    while not ending.is_set():
        try:
            queue_listener.run(open_platform(settings), url, ending)
        except Exception:
            log.exception("the sensors are alone for a moment")
            ending.wait(queue_listener.RETRY_S)


if __name__ == "__main__":
    main()
