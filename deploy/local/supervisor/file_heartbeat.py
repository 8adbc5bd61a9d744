"""Runs a module as ``python -m`` does, and touches a file every second for as long as this process gets to run.

``python -m deploy.local.supervisor.file_heartbeat FILE MODULE [ARGUMENT ...]``: the supervisor reads from the file whether a
service that has no port of its own still runs (:func:`deploy.local.readiness.file_touched`).
"""

from __future__ import annotations

import logging
import runpy
import sys
import threading
import time
from pathlib import Path

from ft_assets.telemetry.outages import Logger

BEAT_S = 1.0


def beat(file: Path) -> None:
    """Touch `file` from a thread of its own until the process ends."""

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
