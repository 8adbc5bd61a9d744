"""Dumps and loads the databases of the embedded server with the tools of its own version, all rows as of one moment."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg2
from psycopg2 import sql

from core.errors import Unavailable
from resources.database import embedded, engine

OWNERS = {embedded.CONTROL_PLANE: embedded.OWNER, embedded.DAGSTER: engine.DAGSTER}
"""Databases of the stack, and the role that owns each."""
LOCK_ATTEMPTS = 10
LOCK_WAIT = "2s"
"""How long Dagster's writers may queue behind the lock; it is tried again after them."""
AS_OWNER = (f"--username={embedded.OWNER}", "--no-password")

Rows = Mapping[str, int]
TABLES = """
SELECT quote_ident(schemaname) || '.' || quote_ident(tablename) FROM pg_tables
WHERE schemaname NOT IN ('pg_catalog', 'information_schema') ORDER BY 1
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Snapshots of both databases, readable until the end of :func:`moment`."""

    taken_at: float
    """Unix seconds."""
    snapshots: Mapping[str, str]
    """Exported snapshot by database."""
    sessions: Mapping[str, Any]
    """A psycopg2 connection with that snapshot, by database."""

    def rows(self) -> dict[str, Rows]:
        """Count the rows of every table."""
        return {name: count_rows(session) for name, session in self.sessions.items()}


@contextmanager
def moment(directory: Path) -> Iterator[Moment]:
    """Yield snapshots of both databases of the server of `directory`, between which neither has changed what the other refers to.

    Writers of Dagster's tables wait for the few milliseconds between both snapshots. Raises ``Unavailable`` if the tables stay locked.
    """
    with ExitStack() as sessions:
        locking, *reading = [sessions.enter_context(_session(directory, name)) for name in (embedded.DAGSTER, *OWNERS)]
        _lock_out_writers(locking)
        snapshots = {name: _export(session) for name, session in zip(OWNERS, reading, strict=True)}
        with locking.cursor() as cursor:
            cursor.execute("SELECT extract(epoch FROM clock_timestamp())::float8")
            (taken_at,) = cursor.fetchone()
        locking.rollback()
        yield Moment(taken_at=taken_at, snapshots=snapshots, sessions=dict(zip(OWNERS, reading, strict=True)))


@contextmanager
def _session(directory: Path, database: str) -> Iterator[Any]:
    session = psycopg2.connect(dbname=database, user=embedded.OWNER, host=str(embedded.socket_dir(directory)))
    try:
        session.set_session(isolation_level="REPEATABLE READ")
        yield session
    finally:
        session.close()


def _lock_out_writers(session: Any) -> None:
    with session.cursor() as cursor:
        cursor.execute("SET deadlock_timeout = '100ms'")  # this session gives way, not a writer, which waits for a second
        cursor.execute("SET lock_timeout = %s", (LOCK_WAIT,))
        cursor.execute(TABLES)
        tables = ", ".join(name for (name,) in cursor.fetchall())
        session.commit()
        for attempt in range(LOCK_ATTEMPTS if tables else 0):
            try:
                cursor.execute(f"LOCK TABLE {tables} IN SHARE MODE")
                return
            except (psycopg2.errors.LockNotAvailable, psycopg2.errors.DeadlockDetected) as error:
                session.rollback()
                if attempt == LOCK_ATTEMPTS - 1:
                    message = f"Dagster's tables stay locked by a long transaction ({error}); try again later, or after `ft down`"
                    raise Unavailable(message, code="database_busy") from error


def _export(session: Any) -> str:
    with session.cursor() as cursor:
        cursor.execute("SELECT pg_export_snapshot()")
        return str(cursor.fetchone()[0])


def count_rows(session: Any) -> Rows:
    """Count the rows of each table of the session's database, by the table's qualified name."""
    counted = {}
    with session.cursor() as cursor:
        cursor.execute(TABLES)
        for (table,) in cursor.fetchall():
            cursor.execute(f"SELECT count(*) FROM {table}")
            counted[table] = int(cursor.fetchone()[0])
    return counted


def dump(directory: Path, database: str, snapshot: str, target: Path) -> None:
    """Write the database at its snapshot to `target`, in pg_dump's custom format (compressed, read in a stream)."""
    _tool("pg_dump", directory, "--format=custom", f"--snapshot={snapshot}", f"--file={target}", database)


def dump_roles(directory: Path, target: Path) -> None:
    """Write the server's login roles and their memberships, without passwords and without the owner, which each server has."""
    text = _tool("pg_dumpall", directory, "--roles-only", "--no-role-passwords")
    own = (f"CREATE ROLE {embedded.OWNER};", f"ALTER ROLE {embedded.OWNER} ")
    target.write_text("".join(line for line in text.splitlines(keepends=True) if not line.startswith(own)))


def load_roles(directory: Path, source: Path) -> None:
    _tool("psql", directory, "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", f"--file={source}", "postgres")


def load(directory: Path, database: str, source: Path) -> Rows:
    """Create `database` from a dump, owned as it was; returns its rows by table."""
    with _session(directory, "postgres") as session:
        session.set_session(autocommit=True, isolation_level="DEFAULT")
        with session.cursor() as cursor:
            cursor.execute(sql.SQL("CREATE DATABASE {} OWNER {}").format(sql.Identifier(database), sql.Identifier(OWNERS[database])))
    _tool("pg_restore", directory, "--exit-on-error", f"--dbname={database}", str(source))
    with _session(directory, database) as session:
        return count_rows(session)


def execute(directory: Path, database: str, *statements: str) -> list[int]:
    """Run statements as the owner in one transaction; returns the number of rows of each."""
    with _session(directory, database) as session, session.cursor() as cursor:
        counts = []
        for statement in statements:
            cursor.execute(statement)
            counts.append(cursor.rowcount)
        session.commit()
        return counts


def _tool(name: str, directory: Path, *arguments: str) -> str:
    """Run a tool of the server's version as the owner; returns what it printed. Raises ``Unavailable`` with its complaint."""
    command = (str(embedded.tools() / name), f"--host={embedded.socket_dir(directory)}", *AS_OWNER, *arguments)
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise Unavailable(f"{name} failed: {done.stderr.strip()[-500:]}", code="database_tool_failed")
    return done.stdout
