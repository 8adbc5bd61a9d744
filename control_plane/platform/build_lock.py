"""One builder at a time for what many jobs share: others wait, report for which holder, and then find it built.

On one machine a file is locked; across machines, a session-level advisory lock of PostgreSQL is held on its own connection. Both end with
the builder, however it ends, so a kill leaves no lease behind. A connection through a pooler that shares sessions cannot hold such a lock;
give the platform a direct one.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

log = logging.getLogger(__name__)

POLL_S = 0.5
"""Seconds between attempts to get a lock."""
SAY_EVERY_S = 30.0
"""Seconds between two reports of a waiting process."""
NAME_CHARACTERS = 63
"""Length limit of a session's ``application_name``; PostgreSQL truncates it."""

Say = Callable[[str], None]


@contextmanager
def one_on_this_machine(directory: Path, *, who: str, say: Say = log.info) -> Iterator[None]:
    """Lock `directory`, which need not exist; the lock is a file beside it."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f".{directory.name}.lock").open("a+") as lock:
        _wait(lambda: _locked(lock), lambda: _holder_in(lock), what=directory.name, say=say)
        lock.truncate(0)
        lock.write(f"{who} (process {os.getpid()})")
        lock.flush()
        yield


@contextmanager
def one_anywhere(engine: Engine, *key: str, who: str, say: Say = log.info) -> Iterator[None]:
    """Lock `key` against every process that uses the same database, until the block ends or this process dies."""
    number = lock_number(*key)
    with engine.connect() as pooled:
        connection = pooled.execution_options(isolation_level="AUTOCOMMIT")
        connection.detach()  # really closed at the end, so that the lock and the name end with the session
        name = f"{who} on {socket.gethostname()}"[:NAME_CHARACTERS]
        connection.execute(sa.text("SELECT set_config('application_name', :name, false)"), {"name": name})
        _wait(lambda: _try_advisory(connection, number), lambda: _holder_of(connection, number), what=key[-1], say=say)
        yield


def lock_number(*key: str) -> int:
    """Return the 64-bit advisory lock key of `key`."""
    return int.from_bytes(hashlib.sha256("\0".join(key).encode()).digest()[:8], "big", signed=True)


def _wait(acquire: Callable[[], bool], holder: Callable[[], str], *, what: str, say: Say) -> None:
    message: float | None = None
    started = time.monotonic()
    while not acquire():
        now = time.monotonic()
        if message is None or now - message >= SAY_EVERY_S:
            say(f"waiting for {what}: {holder()} builds it ({now - started:.0f} s so far)")
            message = now
        time.sleep(POLL_S)
    if message is not None:
        say(f"waited {time.monotonic() - started:.0f} s for {what}")


def _locked(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder_in(lock: IO[str]) -> str:
    lock.seek(0)
    return lock.read() or "another process of this machine"


def _try_advisory(connection: Connection, number: int) -> bool:
    return bool(connection.execute(sa.text("SELECT pg_try_advisory_lock(:n)"), {"n": number}).scalar())


def _holder_of(connection: Connection, number: int) -> str:
    """Return the application name of the session that holds the lock."""
    query = sa.text(
        "SELECT application_name FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE locktype = 'advisory' AND granted"
        " AND objsubid = 1 AND classid::bigint = :high AND objid::bigint = :low AND pg_locks.database = datid"
    )
    unsigned = number & 0xFFFFFFFFFFFFFFFF
    found = connection.execute(query, {"high": unsigned >> 32, "low": unsigned & 0xFFFFFFFF}).scalar()
    return str(found) if found else "another process"
