"""The embedded PostgreSQL, its URLs, and migrations."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg2
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from control_plane.platform.settings import load
from core.errors import Conflict, InvalidRequest, Unavailable
from deploy.local.supervisor import lock
from resources.database import embedded, migrate
from resources.database.engine import PING_AFTER_S, control_plane_url, dagster_url, make_engine
from tests.support.platform.declared_tables import declared_tables


@pytest.fixture
def home() -> Iterator[Path]:
    """A short path that the server's own user can reach, too."""
    with tempfile.TemporaryDirectory(prefix="ft-home-") as directory:
        yield Path(directory)


@pytest.fixture
def empty_database(postgres_dir: Path, request: pytest.FixtureRequest) -> str:
    name = f"empty_{abs(hash(request.node.name))}"
    embedded.start(postgres_dir, databases=(name,), config={"fsync": "off"})
    return embedded.socket_url(postgres_dir, name)


def test_migrations_end_at_the_schema_that_the_code_declares(new_database: Callable[[], str]) -> None:
    engine, metadata = make_engine(new_database()), declared_tables()
    with engine.connect() as conn:
        assert len(sa.inspect(conn).get_table_names()) == len(metadata.tables) + 1, "nothing was migrated, so nothing is compared"
        context = MigrationContext.configure(conn, opts={"compare_type": True, "compare_server_default": True})
        differences = compare_metadata(context, metadata)
    engine.dispose()
    assert differences == []


def test_migrating_at_once_from_several_processes_migrates_once(empty_database: str) -> None:
    engines = [make_engine(empty_database, pool_size=1) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        revisions = list(pool.map(migrate.upgrade, engines))
    assert revisions == [migrate.head()] * 4
    assert migrate.current(engines[0]) == migrate.head()
    for engine in engines:
        engine.dispose()


def test_where_everybody_could_make_tables_only_the_owner_can(empty_database: str) -> None:
    engine = make_engine(empty_database)
    with engine.begin() as conn:
        conn.exec_driver_sql("GRANT CREATE ON SCHEMA public TO PUBLIC")  # as new databases had it before PostgreSQL 15
    migrate.upgrade(engine)
    with engine.connect() as conn:
        roles = conn.exec_driver_sql("SELECT rolname FROM pg_roles WHERE has_schema_privilege(oid, 'public', 'CREATE') AND NOT rolsuper")
        assert [name for name in roles.scalars() if not name.startswith("pg_")] == []
    engine.dispose()


@pytest.mark.parametrize("revision", ["0018", "made by a later version"])
def test_a_database_of_another_version_is_refused_with_a_sentence_and_left_as_it_is(empty_database: str, revision: str) -> None:
    engine = make_engine(empty_database)
    with engine.begin() as conn:
        conn.exec_driver_sql("CREATE TABLE alembic_version (version_num text)")
        conn.execute(sa.text("INSERT INTO alembic_version VALUES (:revision)"), {"revision": revision})
    with pytest.raises(Conflict, match=rf"another version of ft-platform \(schema {revision}\).*set FT_HOME to a new folder"):
        migrate.upgrade(engine)
    with engine.connect() as conn:
        assert sa.inspect(conn).get_table_names() == ["alembic_version"]
    engine.dispose()


def test_starting_a_running_server_again_adopts_it(postgres_dir: Path) -> None:
    before = (postgres_dir / "postmaster.pid").read_text().splitlines()[0]
    embedded.start(postgres_dir, databases=("ft_template",))
    assert (postgres_dir / "postmaster.pid").read_text().splitlines()[0] == before


def test_a_stopped_server_keeps_what_was_committed_and_starts_again(home: Path) -> None:
    directory = home / "pg"
    server = embedded.start(directory, databases=("ft",))
    url = embedded.socket_url(directory, "ft")
    engine = make_engine(url)
    with engine.begin() as conn:
        conn.execute(sa.text("CREATE TABLE kept AS SELECT 7 AS n"))
    embedded.stop(server)
    assert not (directory / "postmaster.pid").exists()
    server = embedded.start(directory, databases=("ft",))
    try:
        with engine.connect() as conn:  # the pool notices that its connection died, and makes another
            assert conn.execute(sa.text("SELECT n FROM kept")).scalar() == 7
    finally:
        engine.dispose()
        embedded.stop(server)


def test_a_home_too_deep_for_a_socket_works_while_the_server_runs_and_says_so_when_not(home: Path) -> None:
    directory = home / ("d" * 60) / ("e" * 60) / "pg"
    with pytest.raises(Unavailable, match="shorter path"):
        embedded.socket_url(directory, "ft")
    server = embedded.start(directory, databases=("ft",))
    try:
        engine = make_engine(embedded.socket_url(directory, "ft"))
        with engine.connect() as conn:
            assert conn.execute(sa.text("SELECT 1")).scalar() == 1
        engine.dispose()
    finally:
        embedded.stop(server)


def test_a_home_with_white_space_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="set FT_HOME"):
        embedded.start(tmp_path / "my home" / "pg")


def test_urls_follow_the_settings(tmp_path: Path) -> None:
    local = load({"FT_HOME": str(tmp_path)})
    assert control_plane_url(local) == f"postgresql+psycopg2://ft_platform:@/ft?host={tmp_path}/postgres"
    assert dagster_url(local) == f"postgresql+psycopg2://ft_dagster:@/dagster?host={tmp_path}/postgres"
    remote = load({"FT_HOME": str(tmp_path), "FT_DATABASE_URL": "postgresql://u:p%40ss@db.example:5432/control"})
    assert dagster_url(remote) == "postgresql+psycopg2://ft_dagster:p%40ss@db.example:5432/dagster"
    assert control_plane_url(remote) == "postgresql://ft_platform:p%40ss@db.example:5432/control"
    assert make_engine(control_plane_url(remote)).dialect.driver == "psycopg2"
    both = load({"FT_HOME": str(tmp_path), "FT_DATABASE_URL": "postgresql://h/a", "FT_DAGSTER_DATABASE_URL": "postgresql://h/b"})
    assert dagster_url(both) == "postgresql://h/b"


def test_a_server_without_an_owner_is_left_to_the_next_one(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that no report names is asked to end by SIGTERM, on which PostgreSQL would wait for its clients."""
    monkeypatch.setenv("FT_HOME", str(home))
    monkeypatch.setenv("FT_STACK_ID", "gone")
    server = embedded.start(home / "pg")
    try:
        engine = make_engine(embedded.socket_url(home / "pg", "ft"))
        with engine.connect() as conn:
            assert lock.end_unrecorded(home) == []
            assert conn.exec_driver_sql("SELECT 1").scalar() == 1
            assert embedded.answers(home / "pg")
        engine.dispose()
    finally:
        embedded.stop(server)
    assert embedded.postmaster(home / "pg") is None


@pytest.mark.slow
def test_a_hung_server_is_replaced_at_the_next_start_and_keeps_its_data(home: Path) -> None:
    """A server that was stopped (SIGSTOP) runs and answers nobody: adopting it would serve nothing."""
    directory = home / "pg"
    embedded.start(directory)
    hung = embedded.postmaster(directory)
    assert hung is not None
    with psycopg2.connect(dbname="ft", user="postgres", host=str(directory)) as connection:
        connection.cursor().execute("CREATE TABLE kept (x int)")
    connection.close()
    hung.suspend()
    assert not embedded.answers(directory)
    server = embedded.start(directory)
    try:
        assert "received immediate shutdown request" in (directory / "log").read_text(), "it could end itself"
        now = embedded.postmaster(directory)
        assert now is not None
        assert now.pid != hung.pid
        with psycopg2.connect(dbname="ft", user="postgres", host=str(directory)) as again:
            again.cursor().execute("SELECT * FROM kept")
        again.close()
    finally:
        embedded.stop(server)


@pytest.mark.parametrize("idle_s", [0.0, 1.1 * PING_AFTER_S])
def test_connections_that_the_server_has_ended_are_replaced(empty_database: str, idle_s: float) -> None:
    engine, other = make_engine(empty_database), make_engine(empty_database)
    held = [engine.connect() for _ in range(3)]
    for conn in held:
        conn.close()
    with other.begin() as conn:
        ended = conn.exec_driver_sql(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        assert ended.scalar_one() == 3
    time.sleep(max(idle_s, 0.3))  # a terminated session takes a moment to end
    for _ in range(3):
        with engine.connect() as conn:
            assert conn.exec_driver_sql("SELECT 1").scalar_one() == 1
    engine.dispose()
    other.dispose()


def test_transactions_read_what_is_committed_whatever_the_database_prefers(empty_database: str) -> None:
    engine = make_engine(empty_database)
    with engine.begin() as conn:
        conn.exec_driver_sql(f"ALTER DATABASE {sa.make_url(empty_database).database} SET default_transaction_isolation = 'serializable'")
    engine.dispose()
    with engine.connect() as conn:
        assert conn.exec_driver_sql("SHOW transaction_isolation").scalar_one() == "read committed"
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        conn.exec_driver_sql("SELECT 1")
    with engine.connect() as conn:
        assert conn.exec_driver_sql("SHOW transaction_isolation").scalar_one() == "read committed"
    engine.dispose()
