"""Dagster's storage as ``dagster.yaml`` configures it: connections that a process keeps, over a real server."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
import sqlalchemy as sa
from dagster._core.instance.ref import InstanceRef

from resources.dagster import pooled_storage
from resources.dagster.pooled_storage import shared_engine
from resources.database import embedded
from resources.database.engine import make_engine

ROOT = Path(__file__).parents[3]


@pytest.fixture
def dagster_home(postgres_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A directory with the project's ``dagster.yaml``, whose storage is a new database."""
    database = f"d_{uuid.uuid4().hex[:12]}"
    run_sql(embedded.socket_url(postgres_dir, "postgres"), f"CREATE DATABASE {database}")
    shutil.copy(ROOT / "dagster.yaml", tmp_path / "dagster.yaml")
    monkeypatch.setenv("DAGSTER_POSTGRES_URL", embedded.socket_url(postgres_dir, database))
    return str(tmp_path)


def run_sql(url: str, statement: str) -> list[sa.Row[tuple[object, ...]]]:
    """Runs one statement over a connection of its own."""
    engine = make_engine(url, pool_size=1, max_overflow=0)
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as conn:
        result = conn.execute(sa.text(statement))
        rows = list(result) if result.returns_rows else []
    engine.dispose()
    return rows


def use(home: str) -> None:
    """What a tick of a sensor does: an instance of its own, and queries of runs, events and ticks."""
    with dg.DagsterInstance.from_ref(InstanceRef.from_dir(home)) as instance:
        assert instance.get_runs() == []
        assert list(instance.all_asset_keys()) == []
        assert instance.all_instigator_state() == []


class Connections:
    """Counts the connections to a database that engines of this process open."""

    def __init__(self, database: str) -> None:
        self.database, self.count = database, 0

    def __call__(self, _dialect: object, _record: object, arguments: object, named: object) -> None:
        self.count += self.database in f"{arguments} {named}"


@pytest.fixture
def connections(dagster_home: str) -> Iterator[Connections]:
    counter = Connections(str(sa.make_url(os.environ["DAGSTER_POSTGRES_URL"]).database))
    sa.event.listen(sa.engine.Engine, "do_connect", counter)
    yield counter
    sa.event.remove(sa.engine.Engine, "do_connect", counter)


def test_instances_after_the_first_open_no_connection_and_look_for_no_tables(dagster_home: str, connections: Connections) -> None:
    use(dagster_home)
    assert connections.count > 0
    connections.count = 0
    use(dagster_home)
    assert connections.count == 0, "the tables are looked for over connections of their own"


def test_a_connection_that_the_server_ended_is_replaced(dagster_home: str) -> None:
    use(dagster_home)
    url = os.environ["DAGSTER_POSTGRES_URL"]
    ended = "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    assert all(row[0] for row in run_sql(url, ended))
    use(dagster_home)


def test_a_forked_child_opens_a_connection_of_its_own(dagster_home: str) -> None:
    use(dagster_home)
    url = os.environ["DAGSTER_POSTGRES_URL"]
    mine = backend(url)
    heard, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(told, str(backend(url)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(heard, 32)) != mine
    assert backend(url) == mine
    os.close(heard)
    os.close(told)


def backend(url: str) -> int:
    """The server's process behind the connection that :func:`shared_engine` lends next."""
    with shared_engine(url).connect() as conn:
        return int(conn.execute(sa.text("SELECT pg_backend_pid()")).scalar_one())


def test_threads_beyond_the_pool_get_a_connection_too_and_it_is_not_kept(dagster_home: str, connections: Connections) -> None:
    engine = shared_engine(os.environ["DAGSTER_POSTGRES_URL"])
    for expected in (pooled_storage.POOL_SIZE + 3, 3):
        connections.count = 0
        held = [engine.connect() for _ in range(pooled_storage.POOL_SIZE + 3)]
        for conn in held:
            conn.close()
        assert connections.count == expected
