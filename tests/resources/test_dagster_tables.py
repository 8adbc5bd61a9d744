"""A tenant's names are searched for in every table of the installed Dagster, or the proof lists the table as not searched."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
import sqlalchemy as sa
from dagster_postgres import DagsterPostgresStorage
from sqlalchemy.engine import Engine

from resources import dagster_records
from resources.dagster_records import Names
from resources.database import embedded
from resources.database.engine import make_engine

NAMES = Names(tenant="acme", ids=frozenset({"ftjob-0123456789abcdef01234567"}))
BINARY = {("snapshots", "snapshot_body")}
"""Columns that are no text and are searched by themselves."""


@pytest.fixture
def engine(postgres_dir: Path) -> Iterator[Engine]:
    """A database with every table of the installed Dagster."""
    admin = make_engine(embedded.socket_url(postgres_dir, "postgres")).execution_options(isolation_level="AUTOCOMMIT")
    name = f"d_{uuid.uuid4().hex[:12]}"
    with admin.connect() as conn:
        conn.execute(sa.text(f"CREATE DATABASE {name}"))
    admin.dispose()
    url = embedded.socket_url(postgres_dir, name)
    storage = DagsterPostgresStorage(url, should_autocreate_tables=True)
    for part in (storage.run_storage, storage.event_log_storage, storage.schedule_storage):
        part.dispose()
    engine = make_engine(url)
    yield engine
    engine.dispose()


def test_every_column_of_the_installed_dagster_that_can_hold_text_is_searched(engine: Engine) -> None:
    with engine.connect() as conn:
        searched = set(dagster_records._columns(conn))
        found = sa.inspect(conn)
        tables = {table: {column["name"]: column["type"] for column in found.get_columns(table)} for table in found.get_table_names()}
        assert dagster_records._tables_without_id(conn) == []
    assert {table for table, columns in tables.items() if "id" not in columns} == dagster_records.NAMES_NOTHING
    numbers = (sa.Integer, sa.Float, sa.Numeric, sa.Boolean, sa.DateTime, sa.Date)
    with_id = {table: columns for table, columns in tables.items() if "id" in columns}
    may_name = {(table, name) for table, columns in with_id.items() for name, kind in columns.items() if not isinstance(kind, numbers)}
    assert may_name - BINARY == searched
    assert with_id.keys() >= dagster_records.DELETED


def test_a_table_without_an_id_that_is_not_known_is_reported_as_not_searched(engine: Engine) -> None:
    with engine.begin() as conn:
        conn.execute(sa.text("CREATE TABLE later (key text PRIMARY KEY, value text)"))
        conn.execute(sa.text("INSERT INTO later VALUES ('a', 'tenants/acme/x')"))
    with dg.DagsterInstance.ephemeral() as instance:
        result = dagster_records.search(instance, engine, NAMES)
    assert result["not_searched"] == ["later"] and result["found"] == []
