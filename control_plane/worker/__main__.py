"""``python -m control_plane.worker``: works until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

from control_plane.composition import open_platform
from control_plane.platform.settings import load
from control_plane.worker.process import run
from core.errors import Unavailable
from core.telemetry import logs, spans

SERVICE = "ft-worker"
log = logging.getLogger("control_plane.worker")


async def _run() -> None:
    ending = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, ending.set)
    await run(open_platform(load()), ending)


def main() -> int:
    logs.configure(SERVICE)
    spans.configure(SERVICE)
    logging.getLogger("procrastinate").setLevel(logging.ERROR)  # it logs the start and the end of every task, with arguments
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(_run())
    except Unavailable as error:
        log.error("the worker ends: %s", error)
        return 1
    except Exception:
        log.exception("the worker ends")
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    spans.close()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)  # without waiting for threads: what they still do is run again by another worker
