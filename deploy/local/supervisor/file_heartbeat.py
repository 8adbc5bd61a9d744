"""Runs a module like ``python -m`` and touches a file every second.

``python -m deploy.local.supervisor.file_heartbeat FILE MODULE [ARGUMENT ...]``: the file tells the supervisor that a service without a
port is alive (:func:`deploy.local.readiness.file_touched`).
"""

from __future__ import annotations

import logging
import runpy
import sys
import threading
import time
from pathlib import Path

from core.telemetry.outages import Logger

BEAT_S = 1.0


def beat(file: Path) -> None:
    """Touch `file` in a background thread until the process ends."""

    def run() -> None:
        while True:
            file.touch()
            time.sleep(BEAT_S)

    threading.Thread(target=run, name="beat", daemon=True).start()


def main() -> None:
    file, module, *arguments = sys.argv[1:]
    beat(Path(file))
    logging.setLoggerClass(Logger)  # Dagster's daemon has handlers of its own
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
