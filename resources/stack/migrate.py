"""The one-shot step that brings the control plane's schema to its newest revision, and makes sure that Dagster's database exists."""

from __future__ import annotations

import sys

import sqlalchemy as sa

from control_plane import settings as settings_module
from control_plane.settings import Settings
from resources.database.engine import control_plane_url, dagster_url, make_engine
from resources.database.migrate import upgrade


def run(settings: Settings) -> None:
    """Safe to run again, and by several at once."""
    engine = make_engine(control_plane_url(settings), pool_size=1, max_overflow=1)
    print(f"schema at revision {upgrade(engine)}", flush=True)
    if not settings.embedded_database and not settings.dagster_database_url:
        _create_dagster_database(engine, sa.make_url(dagster_url(settings)).database or "dagster")
    engine.dispose()


def _create_dagster_database(engine: sa.Engine, name: str) -> None:
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        found = connection.execute(sa.text("SELECT 1 FROM pg_database WHERE datname = :name"), {"name": name}).scalar()
        if found is None:
            quoted = connection.dialect.identifier_preparer.quote_identifier(name)
            connection.exec_driver_sql(f"CREATE DATABASE {quoted}")
            print(f"created database {name}", flush=True)


def main() -> int:
    try:
        run(settings_module.load())
    except sa.exc.SQLAlchemyError as e:  # in one line: its own text ends with the statement, which hides the reason
        print(f"the database refuses: {e.orig if isinstance(e, sa.exc.DBAPIError) else e}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
