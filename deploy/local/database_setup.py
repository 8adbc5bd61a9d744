"""One-shot step that migrates the control plane's schema, lets the login roles log in, and prepares Dagster's role and database."""

from __future__ import annotations

import sys

import sqlalchemy as sa
from psycopg2 import sql

from control_plane.platform import settings as settings_module
from control_plane.platform.settings import Settings
from core.errors import Conflict, FtError
from resources.database.engine import (
    DAGSTER,
    OPERATOR,
    PLATFORM,
    TENANT,
    check_owner_password,
    control_plane_url,
    dagster_url,
    make_engine,
    owner_url,
)
from resources.database.migrate import upgrade


def run(settings: Settings) -> None:
    """Migrate as the schema's owner. Safe to repeat and to run concurrently.

    Raises ``Conflict``, without connecting, if the owner has the password of the login roles.
    """
    check_owner_password(settings)
    engine = make_engine(owner_url(settings), pool_size=1, max_overflow=1)
    print(f"schema at revision {upgrade(engine)}", flush=True)
    let_roles_log_in(engine, password=sa.make_url(control_plane_url(settings)).password)
    if not settings.dagster_database_url:
        _prepare_dagster_database(engine, sa.make_url(dagster_url(settings)))
    engine.dispose()


def let_roles_log_in(engine: sa.Engine, *, password: str | None) -> None:
    """Set the login roles' password to that of ``FT_DATABASE_URL``; without one, the server's rules decide who may log in.

    Raises ``Conflict`` if a role is a superuser or bypasses row security.
    """
    with engine.begin() as connection:
        unsafe = "SELECT string_agg(rolname, ', ') FROM pg_roles WHERE rolname = ANY(%s) AND (rolsuper OR rolbypassrls)"
        if found := connection.exec_driver_sql(unsafe, ([PLATFORM, OPERATOR, TENANT],)).scalar():
            raise Conflict(f"superuser or BYPASSRLS: {found}; run ALTER ROLE <role> NOSUPERUSER NOBYPASSRLS", code="unsafe_database_role")
        if password:
            for role in (PLATFORM, OPERATOR, TENANT):
                _set_password(connection, role, password)


def _prepare_dagster_database(engine: sa.Engine, url: sa.URL) -> None:
    """Create Dagster's role and a database owned by it. A database owned by the schema's owner is transferred to the role.

    Raises ``Conflict`` if another login owns the database.
    """
    name, role = url.database or DAGSTER, url.username or DAGSTER
    quote = engine.dialect.identifier_preparer.quote_identifier
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        if connection.execute(sa.text("SELECT 1 FROM pg_roles WHERE rolname = :name"), {"name": role}).scalar() is None:
            connection.exec_driver_sql(f"CREATE ROLE {quote(role)} LOGIN")
        if url.password:
            _set_password(connection, role, str(url.password))
        owner = sa.text("SELECT pg_get_userbyid(datdba) FROM pg_database WHERE datname = :name")
        found = connection.execute(owner, {"name": name}).scalar()
        if found == role:
            return
        ours = connection.exec_driver_sql("SELECT current_user").scalar_one()
        if found not in (None, ours):
            raise Conflict(
                f"database {name} belongs to {found}, neither to {role} nor to {ours}; "
                "set FT_DAGSTER_DATABASE_URL to a database for Dagster and its login",
                code="dagster_database_taken",
            )
        mode = "SET" if (connection.dialect.server_version_info or (0,)) >= (16,) else "MEMBER"
        if not connection.exec_driver_sql("SELECT pg_has_role(%s, %s)", (role, mode)).scalar():
            connection.exec_driver_sql(f"GRANT {quote(role)} TO CURRENT_USER")  # else only a superuser can give it a database
        if found is None:
            connection.exec_driver_sql(f"CREATE DATABASE {quote(name)} OWNER {quote(role)}")
            print(f"created database {name}", flush=True)
            return
    _transfer_ownership(engine.url.set(database=name), role)


def _transfer_ownership(url: sa.URL, role: str) -> None:
    """Make `role` the owner of the database at `url` and of all objects in its schema ``public``, in one transaction."""
    engine = make_engine(url.render_as_string(hide_password=False), pool_size=1, max_overflow=0)
    quote = engine.dialect.identifier_preparer.quote_identifier
    with engine.begin() as connection:
        connection.exec_driver_sql(f"ALTER DATABASE {quote(str(url.database))} OWNER TO {quote(role)}")
        for kind, name in connection.execute(sa.text(OBJECTS)).all():
            connection.exec_driver_sql(f"ALTER {kind} {name} OWNER TO {quote(role)}".replace("%", "%%"))
    engine.dispose()
    print(f"database {url.database} and its tables now belong to {role}", flush=True)


def _set_password(connection: sa.Connection, role: str, password: str) -> None:
    statement = sql.SQL("ALTER ROLE {} PASSWORD {}").format(sql.Identifier(role), sql.Literal(password))
    raw = connection.connection.driver_connection
    connection.exec_driver_sql(statement.as_string(raw).replace("%", "%%"))


OBJECTS = """
SELECT 'TABLE', oid::regclass::text FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p', 'v', 'm', 'f')
UNION ALL
SELECT 'SEQUENCE', oid::regclass::text FROM pg_class s WHERE relnamespace = 'public'::regnamespace AND relkind = 'S'
    AND NOT EXISTS (SELECT FROM pg_depend WHERE classid = 'pg_class'::regclass AND objid = s.oid AND deptype IN ('a', 'i'))
UNION ALL
SELECT 'TYPE', t.oid::regtype::text FROM pg_type t LEFT JOIN pg_class c ON c.oid = t.typrelid
    WHERE typnamespace = 'public'::regnamespace AND (typtype IN ('e', 'd', 'r') OR c.relkind = 'c')
UNION ALL
SELECT 'ROUTINE', oid::regprocedure::text FROM pg_proc WHERE pronamespace = 'public'::regnamespace
"""
"""Kind and name of the objects in schema ``public`` that have an owner, except sequences of columns, which follow their table."""


def main() -> int:
    try:
        run(settings_module.load())
    except sa.exc.SQLAlchemyError as e:  # without the statement, which would hide the reason
        print(f"database error: {e.orig if isinstance(e, sa.exc.DBAPIError) else e}", flush=True)
        return 1
    except FtError as e:
        print(e.message, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
