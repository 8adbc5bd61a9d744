"""The service that owns the embedded PostgreSQL: starts it, copies its log to stdout, and stops it on SIGTERM."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from control_plane.platform import settings as settings_module
from control_plane.platform.settings import Settings
from core.errors import FtError
from deploy.local.supervisor.child_process import MAX_LOG_BYTES
from deploy.local.supervisor.signal_safe_event import SignalSafeEvent
from resources.atomic_write import write_atomically
from resources.database import embedded

CHECK_EVERY_S = 0.5


def ready_file(settings: Settings) -> Path:
    """Return the file that is written when the server accepts connections and its databases exist, and touched by its owner since."""
    return settings.home / "postgres.ready"


def postmaster_pid(settings: Settings) -> int | None:
    """Return the pid of the running server, if any."""
    process = embedded.postmaster(settings.postgres_dir)
    return process.pid if process else None


def run(settings: Settings) -> int:
    """Run the server until SIGTERM (returns 0) or until it ends by itself (returns 1)."""
    stop_requested = SignalSafeEvent()

    def on_term(_signum: int, _frame: FrameType | None) -> None:
        stop_requested.set()

    signal.signal(signal.SIGTERM, on_term)
    server_log = settings.postgres_dir / "log"
    offset = server_log.stat().st_size if server_log.exists() else 0
    try:
        server = embedded.start(settings.postgres_dir)
    except FtError as e:
        print(e.message, flush=True)
        return 1
    finally:
        offset = _copy(server_log, offset, sys.stdout.buffer)
    pid = postmaster_pid(settings)
    write_atomically(ready_file(settings), f"{pid}\n")
    try:
        while not stop_requested.wait(CHECK_EVERY_S):
            ready_file(settings).touch()
            offset = _copy(server_log, offset, sys.stdout.buffer)
            if postmaster_pid(settings) != pid:
                print(f"the server (pid {pid}) ended unexpectedly", flush=True)
                return 1
    finally:
        ready_file(settings).unlink(missing_ok=True)
        embedded.stop(server)
        _copy(server_log, offset, sys.stdout.buffer)
    return 0


def _copy(source: Path, offset: int, to: BinaryIO) -> int:
    """Copy `source` from `offset` on, and empty it once it is long; returns the new offset."""
    if not source.exists():
        return offset
    with source.open("rb") as f:
        f.seek(min(offset, os.fstat(f.fileno()).st_size))
        data = f.read()
        with suppress(OSError):  # the disk is full: the lines stay in the server's own log, and the server runs on
            to.write(data)
            to.flush()
        end = f.tell()
    if end < MAX_LOG_BYTES:
        return end
    os.truncate(source, 0)  # its writer appends
    return 0


def stop_running(settings: Settings) -> bool:
    """Stop a server whose owner is gone; returns whether there was one."""
    if postmaster_pid(settings) is None:
        return False
    embedded.stop(embedded.start(settings.postgres_dir))
    return True


if __name__ == "__main__":
    sys.exit(run(settings_module.load()))
