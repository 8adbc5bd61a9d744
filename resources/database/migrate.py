"""Runs migrations from code, without an ini file or a command line; safe if several processes start at once."""

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
    """Migrate the schema to `revision` and return the revision. Idempotent; each migration is one transaction.

    A session advisory lock lets one of several processes migrate; the others wait and then have nothing to do.
    """
    with engine.connect() as connection:
        # No time limits: waiting for another process's migration may take long.
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
            connection.invalidate()  # its session settings must not reach the pool


def current(engine: Engine) -> str | None:
    """Return the database's revision; None before the first migration."""
    with engine.connect() as connection:
        return _current(connection)


def head() -> str:
    """Return the newest revision in this code."""
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
