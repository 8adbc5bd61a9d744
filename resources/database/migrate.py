"""Runs migrations from code, without an ini file or a command line; safe if several processes start at once."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.engine import Connection, Engine

from core.errors import Conflict

LOCATION = Path(__file__).parent / "migrations"
LOCK_ID = 0x66745F6D  # "ft_m": any constant that nothing else in this database uses


def upgrade(engine: Engine) -> str:
    """Migrate the schema to the newest revision and return it. Idempotent; each migration is one transaction.

    A session advisory lock lets one of several processes migrate; the others wait and then have nothing to do.

    Raises ``Conflict``, and changes nothing, if the schema has a revision that this code does not know.
    """
    with engine.connect() as connection:
        # No time limits: waiting for another process's migration may take long.
        connection.exec_driver_sql("SET statement_timeout = 0; SET lock_timeout = 0; SET idle_in_transaction_session_timeout = 0")
        connection.execute(sa.text("SELECT pg_advisory_lock(:id)"), {"id": LOCK_ID})
        connection.commit()
        try:
            _check_known(revision_of(connection))
            command.upgrade(_config(connection), "head")
            connection.commit()
            return revision_of(connection) or ""
        finally:
            connection.rollback()
            connection.execute(sa.text("SELECT pg_advisory_unlock(:id)"), {"id": LOCK_ID})
            connection.commit()
            connection.invalidate()  # its session settings must not reach the pool


def current(engine: Engine) -> str | None:
    """Return the database's revision; None before the first migration."""
    with engine.connect() as connection:
        return revision_of(connection)


def head() -> str:
    """Return the newest revision in this code."""
    found = ScriptDirectory(str(LOCATION)).get_current_head()
    assert found is not None
    return found


def _check_known(revision: str | None) -> None:
    known = {script.revision for script in ScriptDirectory(str(LOCATION)).walk_revisions()}
    if revision is not None and revision not in known:
        raise Conflict(
            f"the database was made by another version of ft-platform (schema {revision}) and this version cannot upgrade it; "
            "use that version, or set FT_HOME to a new folder (FT_DATABASE_URL to an empty database)",
            code="schema_of_another_version",
        )


def revision_of(connection: Connection) -> str | None:
    """Return the revision of the database that `connection` reaches; None before the first migration."""
    revision: str | None = MigrationContext.configure(connection).get_current_revision()
    return revision


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(LOCATION).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
