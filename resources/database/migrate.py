"""Migrations, run from code: no ini file, no command line, safe when several processes start at once."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.engine import Connection, Engine

LOCATION = Path(__file__).parent / "migrations"
LOCK_ID = 0x66745F6D  # "ft_m": any constant that nothing else in this database uses


def upgrade(engine: Engine, revision: str = "head") -> str:
    """Bring the schema to `revision` and return it; at that revision already, nothing happens.

    Holds an advisory lock of the session meanwhile, so that of several processes one migrates and the others wait and
    then find nothing to do. Each migration is one transaction.
    """
    with engine.connect() as connection:
        # A waiter must outlive the longest migration of another process: no time limit on this connection.
        connection.exec_driver_sql("SET statement_timeout = 0; SET lock_timeout = 0; SET idle_in_transaction_session_timeout = 0")
        connection.execute(sa.text("SELECT pg_advisory_lock(:id)"), {"id": LOCK_ID})
        connection.commit()
        try:
            command.upgrade(_config(connection), revision)
            connection.commit()
            return _current(connection) or ""
        finally:
            connection.rollback()
            connection.execute(sa.text("SELECT pg_advisory_unlock(:id)"), {"id": LOCK_ID})
            connection.commit()
            connection.invalidate()  # its session settings must not return to the pool


def current(engine: Engine) -> str | None:
    """The revision that the database is at; None before the first migration."""
    with engine.connect() as connection:
        return _current(connection)


def head() -> str:
    """The newest revision that this code knows."""
    found = ScriptDirectory(str(LOCATION)).get_current_head()
    assert found is not None
    return found


def _current(connection: Connection) -> str | None:
    revision: str | None = MigrationContext.configure(connection).get_current_revision()
    return revision


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(LOCATION).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
