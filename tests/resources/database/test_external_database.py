"""A PostgreSQL of the operator's own, whose owner of the schema is no superuser."""

from __future__ import annotations

import base64
import hashlib
import hmac
import importlib
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import ProgrammingError

from control_plane.platform.settings import Settings, load
from core.errors import Conflict
from deploy.local import database_setup
from deploy.local.stack_services import prepare_home
from resources.database import embedded

INITIAL = importlib.import_module("resources.database.migrations.versions.initial")


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
    database_setup.run(settings)
    database_setup.run(settings)
    with connected(server, "dagster", "ft_dagster") as conn:
        conn.exec_driver_sql("CREATE TABLE runs (id serial PRIMARY KEY)")
    with connected(server, "platform", "ft_operator") as conn:
        assert conn.exec_driver_sql("SELECT count(*) FROM jobs").scalar() == 0
        assert not conn.exec_driver_sql("SELECT has_schema_privilege('public', 'CREATE')").scalar()


@pytest.mark.parametrize(
    ("url", "owner"),
    [
        ("postgresql://ada:hunter2@db.example/ft", ""),
        ("postgresql://any:hunter2@db.example/ft", "postgresql://ada:hunter2@db.example/ft"),
        ("postgresql:///ft?host=db.example&user=ada&password=hunter2", ""),
        ("postgresql://any:hunter2@db.example/ft", "postgresql://ada@db.example/ft?password=hunter2"),
    ],
    ids=["no owner given", "the same password", "a query's password", "one of each"],
)
def test_a_password_of_the_roles_that_opens_the_owner_is_refused_before_anything_starts(tmp_path: Path, url: str, owner: str) -> None:
    given = load({"FT_HOME": str(tmp_path / "home"), "FT_DATABASE_URL": url, "FT_OWNER_DATABASE_URL": owner})
    for start in (database_setup.run, prepare_home):
        with pytest.raises(Conflict, match="set FT_OWNER_DATABASE_URL to the owner's URL") as refused:
            start(given)
        assert refused.value.code == "owner_password_shared" and "hunter2" not in refused.value.message
    assert not (tmp_path / "home").exists()


def test_the_roles_get_the_password_of_the_platforms_url_and_the_owner_keeps_its_own(server: Path, settings: Settings) -> None:
    with connected(server) as conn:
        conn.exec_driver_sql("ALTER ROLE ada PASSWORD 'of the owner'")
        kept = passwords(conn)["ada"]
    url = sa.make_url(settings.database_url)
    apart = {"database_url": url.set(password="of the roles"), "owner_database_url": url.set(password="of the owner")}
    database_setup.run(replace(settings, **{name: url.render_as_string(hide_password=False) for name, url in apart.items()}))
    with connected(server) as conn:
        found = passwords(conn)
    assert found["ada"] == kept
    assert [name for name, secret in found.items() if opens(secret, "of the roles")] == [
        "ft_dagster",
        "ft_operator",
        "ft_platform",
        "ft_tenant",
    ]
    assert opens(found["ada"], "of the owner") and not opens(found["ada"], "of the roles")


def passwords(conn: sa.Connection) -> dict[str, str]:
    """What the server keeps of each role's password, for those that have one."""
    rows = conn.exec_driver_sql("SELECT rolname, rolpassword FROM pg_authid WHERE rolpassword IS NOT NULL ORDER BY rolname")
    return {row.rolname: row.rolpassword for row in rows}


def opens(secret: str, password: str) -> bool:
    """Whether `password` is the one that the server keeps as `secret` (SCRAM-SHA-256, RFC 5803)."""
    rounds, salt, stored = re.fullmatch(r"SCRAM-SHA-256\$(\d+):([^$]+)\$([^:]+):.*", secret).groups()  # type: ignore[union-attr]
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), base64.b64decode(salt), int(rounds))
    key = hmac.digest(salted, b"Client Key", "sha256")
    return hashlib.sha256(key).digest() == base64.b64decode(stored)


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
    database_setup.run(settings)
    with connected(server, "dagster", "ft_dagster") as conn:
        for statement in (
            "INSERT INTO \"Old Runs\" (s) VALUES ('on')", "SELECT nextval('numbers')", 'ALTER TABLE "Old Runs" ADD COLUMN more int',
            "ALTER TYPE state ADD VALUE 'idle'", "DROP VIEW seen", "DROP FUNCTION one()", "CREATE TABLE later (x int)",
        ):  # fmt: skip
            conn.exec_driver_sql(statement)


@pytest.mark.parametrize("attribute", ["SUPERUSER", "BYPASSRLS"])
def test_a_role_that_row_security_does_not_bind_is_refused(server: Path, settings: Settings, attribute: str) -> None:
    database_setup.run(settings)
    with connected(server) as admin:
        admin.exec_driver_sql(f"ALTER ROLE ft_tenant {attribute}")
        try:
            with pytest.raises(Conflict, match="superuser or BYPASSRLS: ft_tenant; run ALTER ROLE") as refused:
                database_setup.run(settings)
        finally:
            admin.exec_driver_sql(f"ALTER ROLE ft_tenant NO{attribute}")
    assert refused.value.code == "unsafe_database_role"


def test_a_database_of_another_login_is_left_alone(server: Path, settings: Settings) -> None:
    with connected(server) as conn:
        conn.exec_driver_sql("CREATE DATABASE dagster OWNER stranger")
    with pytest.raises(Conflict, match=r"database dagster belongs to stranger.*FT_DAGSTER_DATABASE_URL") as refused:
        database_setup.run(settings)
    assert refused.value.code == "dagster_database_taken"


@pytest.mark.parametrize(
    ("statement", "remedy"),
    [
        (INITIAL.MAKE_ROLE.format(role="asleep", attributes="LOGIN"), "as a superuser run: ALTER ROLE asleep LOGIN"),
        (INITIAL.MAKE_ROLE.format(role="missing", attributes="LOGIN"), "as a superuser run: CREATE ROLE missing LOGIN"),
        (INITIAL.MAKE_MEMBER, "as a superuser run: GRANT ft_platform TO ft_operator"),
    ],
)
def test_an_owner_that_makes_no_roles_reads_what_a_superuser_has_to_run(
    server: Path, settings: Settings, statement: str, remedy: str
) -> None:
    database_setup.run(settings)
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
        conn.execute(sa.text(INITIAL.MAKE_MEMBER))  # a member already: no right is needed
