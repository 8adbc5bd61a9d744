"""What migrations do with the rows of an earlier release."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from resources.database import embedded, migrate
from resources.database.engine import make_engine

FIRST_RELEASE = "initial_15"
VALUES: dict[str, Any] = {
    "text": "x", "bigint": 1, "integer": 1, "jsonb": "{}", "timestamp with time zone": "2026-11-27", "boolean": False,
    "double precision": 1.0,
}  # fmt: skip


@pytest.fixture
def first_release(postgres_dir: Path) -> Engine:
    """A database as the first release makes it, without rows."""
    embedded.start(postgres_dir, databases=("first_release",), config={"fsync": "off"})
    engine = make_engine(embedded.socket_url(postgres_dir, "first_release"))
    with engine.connect() as conn:
        command.upgrade(migrate._config(conn), FIRST_RELEASE)
        conn.commit()
    return engine


def insert(conn: Connection, table: str, **given: Any) -> None:
    """Insert a row with values of the right type in all columns that need one."""
    columns = sa.inspect(conn).get_columns(table)
    types = dict(
        conn.execute(sa.text("SELECT column_name, data_type FROM information_schema.columns WHERE table_name = :t"), {"t": table}).all()
    )
    needed = {c["name"]: VALUES[types[c["name"]]] for c in columns if not c["nullable"] and c["default"] is None and not c.get("identity")}
    row = needed | given
    names, marks = ", ".join(f'"{name}"' for name in row), ", ".join(f":{name}" for name in row)
    conn.execute(sa.text(f"INSERT INTO {table} ({names}) VALUES ({marks})"), row)


def test_rows_of_the_first_release_get_what_today_needs(first_release: Engine) -> None:
    with first_release.begin() as conn:
        conn.exec_driver_sql("SET LOCAL session_replication_role = replica")  # no triggers: these rows need not be complete
        insert(conn, "tenants", id="t")
        insert(conn, "jobs", id="j", tenant_id="t")
        insert(conn, "adapters", id="a", tenant_id="t", job_id="j", stage="deprecated", deprecated_at="2026-11-27")
        for id, format, status in (
            ("e1", "merged", "running"),
            ("e2", "gguf", "queued"),
            ("e3", "adapter", "running"),
            ("e4", "merged", "ready"),
        ):
            insert(conn, "exports", id=id, tenant_id="t", adapter_id="a", key=id, format=format, status=status, claim="c")
        insert(conn, "audit_log", action="before")
        insert(conn, "attempts", job_id="j", attempt=1)
        for node in (0, 1):
            insert(conn, "agents", job_id="j", attempt=1, node=node, token="runs on")
    assert migrate.upgrade(first_release) == migrate.head()
    with first_release.connect() as conn:
        found = conn.exec_driver_sql("SELECT id, job_id, status, claim, error ->> 'code' FROM exports ORDER BY id").all()
        assert [tuple(row) for row in found] == [
            ("e1", "j", "failed", None, "export_failed"), ("e2", "j", "failed", None, "export_failed"),
            ("e3", "j", "running", "c", None), ("e4", "j", "ready", "c", None),
        ]  # fmt: skip
        assert conn.exec_driver_sql("SELECT position FROM audit_log WHERE action = 'before'").scalar_one() is None, "the worker places it"
        tokens = conn.exec_driver_sql("SELECT sha256, job_id, attempt FROM agent_tokens").all()
        assert [tuple(row) for row in tokens] == [(hashlib.sha256(b"runs on").hexdigest(), "j", 1)]
        conn.exec_driver_sql("UPDATE adapters SET signature = '{}' WHERE id = 'a'")  # a part of the record that comes later
        placed = "UPDATE audit_log SET position = 1, content_sha256 = 'x', sha256 = 'y'"
        conn.exec_driver_sql(placed)
        with pytest.raises(DBAPIError, match="audit_log"):
            conn.exec_driver_sql(placed.replace("= 1", "= 2"))
    first_release.dispose()
