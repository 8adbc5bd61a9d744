"""A PostgreSQL of the operator's own, whose owner of the schema is no superuser."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import ProgrammingError

from control_plane.settings import Settings, load
from ft_assets.errors import Conflict
from resources.database import embedded
from resources.stack import migrate

LOGIN_ROLES = importlib.import_module("resources.database.migrations.versions.0018_login_roles")


@pytest.fixture(scope="module")
def server() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ft-own-") as home:
        Path(home).chmod(0o755)
        directory = Path(home) / "data"
        running = embedded.start(directory, databases=(), config={"fsync": "off"})
        with connected(directory) as conn:
            conn.exec_driver_sql("CREATE ROLE ada LOGIN CREATEDB CREATEROLE NOSUPERUSER")
            conn.exec_driver_sql("CREATE ROLE stranger LOGIN")
            conn.exec_driver_sql("CREATE DATABASE platform OWNER ada")
        yield directory
        embedded.stop(running)


@contextmanager
def connected(server: Path, database: str = "postgres", user: str = "postgres") -> Iterator[sa.Connection]:
    engine = sa.create_engine(embedded.socket_url(server, database, user=user), poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as conn:
        yield conn


@pytest.fixture
def settings(server: Path, tmp_path: Path) -> Settings:
    """Without a database of Dagster's."""
    with connected(server) as conn:
        conn.exec_driver_sql("DROP DATABASE IF EXISTS dagster")
    return load({"FT_HOME": str(tmp_path), "FT_DATABASE_URL": embedded.socket_url(server, "platform", user="ada")})


def test_an_owner_that_is_no_superuser_prepares_both_databases_and_may_do_so_again(server: Path, settings: Settings) -> None:
    migrate.run(settings)
    migrate.run(settings)
    with connected(server, "dagster", "ft_dagster") as conn:
        conn.exec_driver_sql("CREATE TABLE runs (id serial PRIMARY KEY)")
    with connected(server, "platform", "ft_operator") as conn:
        assert conn.exec_driver_sql("SELECT count(*) FROM jobs").scalar() == 0
        assert not conn.exec_driver_sql("SELECT has_schema_privilege('public', 'CREATE')").scalar()


def test_a_database_of_the_owner_becomes_dagsters_with_all_that_is_in_it(server: Path, settings: Settings) -> None:
    with connected(server) as conn:
        conn.exec_driver_sql("CREATE DATABASE dagster OWNER ada")
    with connected(server, "dagster", "ada") as conn:
        for statement in (
            "CREATE TYPE state AS ENUM ('on', 'off')", "CREATE SEQUENCE numbers",
            'CREATE TABLE "Old Runs" (id serial PRIMARY KEY, s state)',
            "CREATE VIEW seen AS SELECT * FROM \"Old Runs\"", "CREATE FUNCTION one() RETURNS int LANGUAGE sql AS 'SELECT 1'",
        ):  # fmt: skip
            conn.exec_driver_sql(statement)
    migrate.run(settings)
    with connected(server, "dagster", "ft_dagster") as conn:
        for statement in (
            "INSERT INTO \"Old Runs\" (s) VALUES ('on')", "SELECT nextval('numbers')", 'ALTER TABLE "Old Runs" ADD COLUMN more int',
            "ALTER TYPE state ADD VALUE 'idle'", "DROP VIEW seen", "DROP FUNCTION one()", "CREATE TABLE later (x int)",
        ):  # fmt: skip
            conn.exec_driver_sql(statement)


@pytest.mark.parametrize("attribute", ["SUPERUSER", "BYPASSRLS"])
def test_a_role_that_row_security_does_not_bind_is_refused(server: Path, settings: Settings, attribute: str) -> None:
    migrate.run(settings)
    with connected(server) as admin:
        admin.exec_driver_sql(f"ALTER ROLE ft_tenant {attribute}")
        try:
            with pytest.raises(Conflict, match="superuser or BYPASSRLS: ft_tenant; run ALTER ROLE") as refused:
                migrate.run(settings)
        finally:
            admin.exec_driver_sql(f"ALTER ROLE ft_tenant NO{attribute}")
    assert refused.value.code == "unsafe_database_role"


def test_a_database_of_another_login_is_left_alone(server: Path, settings: Settings) -> None:
    with connected(server) as conn:
        conn.exec_driver_sql("CREATE DATABASE dagster OWNER stranger")
    with pytest.raises(Conflict, match=r"database dagster belongs to stranger.*FT_DAGSTER_DATABASE_URL") as refused:
        migrate.run(settings)
    assert refused.value.code == "dagster_database_taken"


@pytest.mark.parametrize(
    ("statement", "remedy"),
    [
        (LOGIN_ROLES.MAKE_ROLE.format(role="asleep", attributes="LOGIN"), "as a superuser run: ALTER ROLE asleep LOGIN"),
        (LOGIN_ROLES.MAKE_ROLE.format(role="missing", attributes="LOGIN"), "as a superuser run: CREATE ROLE missing LOGIN"),
        (LOGIN_ROLES.MAKE_MEMBER, "as a superuser run: GRANT ft_platform TO ft_operator"),
    ],
)
def test_an_owner_that_makes_no_roles_reads_what_a_superuser_has_to_run(
    server: Path, settings: Settings, statement: str, remedy: str
) -> None:
    migrate.run(settings)
    with connected(server) as admin:
        admin.exec_driver_sql("DROP ROLE IF EXISTS asleep; CREATE ROLE asleep NOLOGIN")
        for granter in ("ada", "postgres"):
            admin.exec_driver_sql(f"REVOKE ft_platform FROM ft_operator GRANTED BY {granter}")
        try:
            with connected(server, user="stranger") as conn, pytest.raises(ProgrammingError, match=remedy):
                conn.execute(sa.text(statement))
        finally:
            admin.exec_driver_sql("GRANT ft_platform TO ft_operator")
    with connected(server, user="stranger") as conn:
        conn.execute(sa.text(LOGIN_ROLES.MAKE_MEMBER))  # a member already: no right is needed
