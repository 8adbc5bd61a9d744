"""What the soaked stack depends on and the benchmark can spoil: its database's socket, its object store, its disk, its clocks."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from resources.database.embedded import SOCKET_NAME
from tests.support.processes.small_disk import SmallDisk, mounted_disk
from tests.support.servers.checked_s3 import checked_s3
from tests.support.servers.faulty_proxy import FaultyProxy, faulty_proxy

BUCKET = "soak"
DISK_SIZE = "2g"
"""A full fine-tuning of the demo model keeps 3 checkpoints of 40 MB, and 14 MB for an hour after its end; a hundred jobs end in an hour."""
DIRECT_PORT = 5433
"""Under which clients reach the database's socket itself: libpq derives the socket's name from it."""
LIBFAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")
"""Of Debian's package ``faketime``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutsideServices:
    database: FaultyProxy
    store: FaultyProxy
    disk: SmallDisk | None
    """Holds the working directories of jobs; None without the right to mount."""
    clocks: Path | None
    """A file per process shifts its clock; None without libfaketime."""
    env: Mapping[str, str]
    left_out: tuple[str, ...]
    """Faults that this machine cannot have, and why."""

    def shift_clock(self, pid: int, seconds: float) -> None:
        assert self.clocks is not None
        (self.clocks / str(pid)).write_text(f"{seconds:+.1f}")


@contextlib.contextmanager
def outside_services(home: Path) -> Iterator[OutsideServices]:
    """Everything outside of the stack that is to run in ``home/ft``, with the variables that lead it there."""
    ft = home / "ft"
    ft.mkdir(mode=0o700, parents=True)
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line a request otherwise
    left_out, env, clocks = [], {}, None
    with contextlib.ExitStack() as opened:
        _, url = s3 = opened.enter_context(faulty_proxy(*opened.enter_context(checked_s3())))
        httpx.put(f"{url}/{BUCKET}").raise_for_status()
        env |= {"FT_OBJECT_STORE": f"s3://{BUCKET}/objects", "AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1"}
        env |= {"AWS_ACCESS_KEY_ID": "soak", "AWS_SECRET_ACCESS_KEY": "soak"}
        disk = None
        try:
            disk = opened.enter_context(mounted_disk(ft / "work", DISK_SIZE))
        except PermissionError as e:
            left_out.append(f"full disk: {e}")
        if LIBFAKETIME.exists():
            clocks = home / "clocks"
            clocks.mkdir()
            path = os.pathsep.join([str(Path(__file__).parent / "shifted_clock"), str(Path(__file__).parents[2])])
            env |= {"LD_PRELOAD": str(LIBFAKETIME), "FAKETIME_DONT_FAKE_MONOTONIC": "1", "FAKETIME_CACHE_DURATION": "1"}
            env |= {"PYTHONPATH": path, "FT_SOAK_CLOCKS": str(clocks)}
        else:
            left_out.append(f"shifted clock: {LIBFAKETIME} is missing; install Debian's package faketime")
        database = opened.enter_context(_before_socket(ft / "postgres" / SOCKET_NAME))
        yield OutsideServices(database=database, store=s3[0], disk=disk, clocks=clocks, env=env, left_out=tuple(left_out))


@contextlib.contextmanager
def _before_socket(path: Path) -> Iterator[FaultyProxy]:
    """A proxy that takes the place of the database's socket, again whenever a starting server has made a new one."""
    real, ended = path.with_name(f".s.PGSQL.{DIRECT_PORT}"), threading.Event()
    proxy = FaultyProxy(str(real))

    def watch() -> None:
        own, made = (0, 0), path.with_name(".s.made")
        while not ended.wait(0.01):  # a server makes its socket some 100 ms before it takes clients
            with contextlib.suppress(OSError):
                if _identity(path) == own:
                    continue
                for left in (made, real):
                    left.unlink(missing_ok=True)
                os.link(path, real)
                listener = socket.socket(socket.AF_UNIX)
                listener.bind(str(made))
                listener.listen(128)
                os.chown(made, path.stat().st_uid, path.stat().st_gid)
                own = _identity(made)
                made.replace(path)
                threading.Thread(target=proxy.serve, args=(listener,), daemon=True).start()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        ended.set()
        thread.join()


def _identity(socket_file: Path) -> tuple[int, int]:
    """Inode numbers are used again, and the server changes the mode of what lies at the path: its birth is the time of modification."""
    found = socket_file.lstat()
    return found.st_ino, found.st_mtime_ns
