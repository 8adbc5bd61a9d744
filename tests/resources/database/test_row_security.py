"""Row security and the audit log: what the database itself does about callers."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest
import sqlalchemy as sa
from alembic.script import ScriptDirectory
from sqlalchemy.exc import DBAPIError, ProgrammingError

from control_plane.notifications.tables import outbox
from control_plane.platform.context import Actor, Platform
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from control_plane.tenants.tables import api_keys, audit_log
from control_plane.tenants.tables import tenants as tenants_table
from resources.database import migrate
from tests.support.platform.database_roles import as_owner
from tests.support.platform.declared_tables import declared_tables

OF_THE_PLATFORM = {
    "agents", "agent_tokens", "held_devices", "operator_keys", "mirrors", "adapter_stage_moves", "run_launches", "scheduler_state",
    "node_drains", "node_health", "maintenance", "rate_limits", "console_sessions", "model_servers", "recipes", "signing_keys",
}  # fmt: skip
"""Tables that hold nothing of any tenant."""
BY_PARENT = {
    "job_events", "health_verdicts", "reservations", "attempts", "checkpoints", "wandb_runs", "sweep_trials", "deployments",
    "replica_adapters", "deletion_objects",
}  # fmt: skip
KEY = Actor(kind="key", id="key_1", ip="203.0.113.7", user_agent="tests", request_id="req_1")


@pytest.fixture
def other(platform: Platform) -> Tenant:
    made, _ = tenants.create(platform, f"t-{uuid.uuid4().hex[:10]}")
    return made


def test_every_table_of_tenants_is_confined(platform: Platform) -> None:
    query = "SELECT c.relname FROM pg_class c JOIN pg_policy p ON p.polrelid = c.oid WHERE c.relrowsecurity"
    with platform.engine.connect() as conn:
        confined = set(conn.exec_driver_sql(query).scalars())
    owned = {t.name for t in declared_tables().tables.values() if "tenant_id" in t.c} | {"tenants"}
    assert confined == owned | BY_PARENT
    assert set(declared_tables().tables) == confined | OF_THE_PLATFORM


def test_every_confined_table_is_open_to_the_platform(platform: Platform) -> None:
    query = (
        "SELECT c.relname, has_table_privilege('ft_platform', c.oid, 'SELECT'), "
        "EXISTS (SELECT FROM pg_policy p WHERE p.polrelid = c.oid AND p.polname = 'of_platform') "
        "FROM pg_class c WHERE c.relrowsecurity"
    )
    with platform.engine.connect() as conn:
        found = {name: (granted, policy) for name, granted, policy in conn.exec_driver_sql(query).all()}
    assert len(found) > 30
    assert {name: rights for name, rights in found.items() if rights != (True, True)} == {}


def test_columns_that_tenants_write_are_columns_of_the_schema(platform: Platform) -> None:
    migrations = [script.module for script in ScriptDirectory(str(migrate.LOCATION)).walk_revisions()]
    written = [entry for module in migrations for entry in getattr(module, "WRITTEN_BY_TENANTS", {}).items()]
    named = {(table, column) for table, (inserted, updated, _) in written for column in f"{inserted} {updated}".split()}
    assert named - {(table.name, column.name) for table in declared_tables().tables.values() for column in table.c} == set()
    query = (
        "SELECT DISTINCT table_name, column_name FROM information_schema.column_privileges "
        "WHERE grantee = 'ft_tenant' AND privilege_type IN ('INSERT', 'UPDATE')"
    )
    with as_owner(platform).connect() as conn:
        assert {tuple(row) for row in conn.exec_driver_sql(query).all()} == named


def test_a_query_that_forgets_its_tenant_finds_that_tenant_alone(platform: Platform, tenant: Tenant, other: Tenant) -> None:
    scoped = platform.in_scope_of(tenant.id, KEY)
    with scoped.engine.connect() as conn:
        assert set(conn.execute(sa.select(api_keys.c.tenant_id)).scalars()) == {tenant.id}
        assert list(conn.execute(sa.select(tenants_table.c.id)).scalars()) == [tenant.id]
    with scoped.whole.engine.connect() as conn:
        assert {tenant.id, other.id} <= set(conn.execute(sa.select(tenants_table.c.id)).scalars())
    with platform.engine.connect() as conn:
        assert {tenant.id, other.id} <= set(conn.execute(sa.select(tenants_table.c.id)).scalars()), "the pool's connections keep nothing"


def test_a_row_of_another_tenant_can_be_neither_changed_nor_made(platform: Platform, tenant: Tenant, other: Tenant) -> None:
    scoped = platform.in_scope_of(tenant.id, KEY)
    with scoped.engine.begin() as conn:
        changed = conn.execute(sa.update(api_keys).where(api_keys.c.tenant_id == other.id).values(revoked_at=platform.clock()))
        assert changed.rowcount == 0
    values = {"id": f"evt_{uuid.uuid4().hex}", "type": "x", "subject": "x", "data": {}, "created_at": platform.clock()}
    with pytest.raises(ProgrammingError, match="row-level security"), scoped.engine.begin() as conn:
        conn.execute(sa.insert(outbox).values(tenant_id=other.id, **values))
    with scoped.engine.begin() as conn:
        conn.execute(sa.insert(outbox).values(tenant_id=tenant.id, **values))


@pytest.mark.parametrize("table", ["operator_keys", "mirrors"])
def test_what_is_the_platforms_is_closed_to_tenants(platform: Platform, tenant: Tenant, table: str) -> None:
    with pytest.raises(ProgrammingError, match="permission denied"), platform.in_scope_of(tenant.id, KEY).engine.connect() as conn:
        conn.execute(sa.select(declared_tables().tables[table]))


@pytest.mark.parametrize("role", ["", "ft_platform", "ft_operator", "postgres"])
def test_no_statement_leaves_the_scope_of_a_tenant(platform: Platform, tenant: Tenant, other: Tenant, role: str) -> None:
    with platform.in_scope_of(tenant.id, KEY).engine.connect() as conn:
        if role:
            with pytest.raises(ProgrammingError, match="permission denied to set role"):
                conn.exec_driver_sql(f"SET ROLE {role}")
        else:
            conn.exec_driver_sql("RESET ROLE")
            assert list(conn.execute(sa.select(tenants_table.c.id)).scalars()) == [tenant.id]


@pytest.mark.parametrize("login", ["platform", "operator", "tenant"])
def test_processes_log_in_as_roles_that_own_nothing_and_bypass_nothing(platform: Platform, login: str) -> None:
    with getattr(platform.logins, login).connect() as conn:
        rights = conn.exec_driver_sql(
            "SELECT rolsuper, rolbypassrls, rolcreaterole, rolcreatedb FROM pg_roles WHERE rolname = session_user"
        )
        assert rights.one() == (False, False, False, False)
        assert conn.exec_driver_sql("SELECT count(*) FROM pg_class WHERE pg_get_userbyid(relowner) = session_user").scalar() == 0
        with pytest.raises(ProgrammingError, match="must be owner"):
            conn.exec_driver_sql("ALTER TABLE jobs DISABLE ROW LEVEL SECURITY")


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE tenants SET tier = 'premium'",
        "UPDATE tenants SET hard_gpu_hours = NULL",
        "UPDATE tenants SET suspended_at = NULL",
        "UPDATE jobs SET tier = 'premium'",
        "UPDATE jobs SET expected_s = 1",
        "UPDATE evaluations SET tenant_id = 'another'",
        "UPDATE adapters SET eval_passed = true",
        "UPDATE reservations SET released_at = now()",
        "UPDATE attempts SET outcome = 'failed'",
        "UPDATE ledger_entries SET amount_micros = 0",
        "DELETE FROM job_events",
        "DELETE FROM jobs",
    ],
)
def test_a_tenants_call_writes_only_the_columns_that_are_its_own(platform: Platform, tenant: Tenant, statement: str) -> None:
    with platform.in_scope_of(tenant.id, KEY).engine.connect() as conn, pytest.raises(ProgrammingError, match="permission denied"):
        conn.exec_driver_sql(statement)


def test_no_row_is_given_to_another_tenant(platform: Platform) -> None:
    query = (
        "SELECT table_name FROM information_schema.column_privileges "
        "WHERE grantee = 'ft_tenant' AND privilege_type = 'UPDATE' AND column_name = 'tenant_id'"
    )
    with as_owner(platform).connect() as conn:
        assert conn.exec_driver_sql(query).scalars().all() == []


def test_whoever_acts_on_somebodys_behalf_is_out_of_the_scope_it_came_from(platform: Platform, tenant: Tenant, other: Tenant) -> None:
    acting = platform.in_scope_of(tenant.id, KEY).acting_as(Actor(kind="operator", id="op_1"))
    with acting.engine.connect() as conn:
        assert {tenant.id, other.id} <= set(conn.execute(sa.select(tenants_table.c.id)).scalars())


def test_only_operators_write_the_keys_of_operators(platform: Platform) -> None:
    statement = "DELETE FROM operator_keys WHERE id = 'none'"
    with platform.engine.connect() as conn, pytest.raises(ProgrammingError, match="permission denied"):
        conn.exec_driver_sql(statement)
    with platform.acting_as(Actor(kind="operator", id="op_1")).engine.connect() as conn:
        conn.exec_driver_sql(statement)


def test_a_connection_without_transactions_has_no_scope_and_is_refused(platform: Platform, tenant: Tenant) -> None:
    scoped = platform.in_scope_of(tenant.id, KEY)
    with scoped.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn, pytest.raises(RuntimeError, match="scope"):
        conn.execute(sa.select(api_keys))


def test_a_change_leaves_its_line_in_the_audit_log(platform: Platform, tenant: Tenant) -> None:
    key = tenants.create_key(platform.in_scope_of(tenant.id, KEY), tenant.id, name="ci", scopes=["read"])
    tenants.revoke_key(platform, tenant.id, key.id)
    with platform.engine.connect() as conn:
        made, ended = conn.execute(sa.select(audit_log).where(audit_log.c.object_id == key.id).order_by(audit_log.c.seq)).all()
    assert (made.action, made.actor_kind, made.actor_id, made.ip, made.request_id) == (
        "api_key.created", "key", "key_1", "203.0.113.7", "req_1",
    )  # fmt: skip
    assert made.changes["scopes"] == [None, ["read"]] and made.changes["name"] == [None, "ci"]
    assert key.secret not in str(made.changes) and "sha256" not in made.changes
    assert (ended.action, ended.actor_kind, ended.actor_id, list(ended.changes)) == ("api_key.updated", "system", "ft", ["revoked_at"])


def test_what_is_undone_leaves_no_line(platform: Platform, tenant: Tenant) -> None:
    with platform.engine.connect() as conn:
        conn.execute(sa.update(tenants_table).where(tenants_table.c.id == tenant.id).values(name="renamed"))
        conn.rollback()
        lines = conn.execute(sa.select(audit_log).where(audit_log.c.object_id == tenant.id)).all()
    assert [line.action for line in lines] == ["tenant.created"]


@pytest.mark.parametrize("change", ["UPDATE audit_log SET actor_id = 'nobody'", "DELETE FROM audit_log", "TRUNCATE audit_log"])
def test_the_audit_log_is_only_ever_added_to(platform: Platform, tenant: Tenant, change: str) -> None:
    with pytest.raises(DBAPIError, match="only ever added to"), as_owner(platform).begin() as conn:
        conn.exec_driver_sql(change)
    with pytest.raises(DBAPIError, match="permission denied"), platform.engine.begin() as conn:
        conn.exec_driver_sql(change)


@pytest.fixture(params=["attempts", "checkpoints", "job_events"])
def child(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_events_and_attempts_of_other_tenants_jobs_are_hidden(
    platform: Platform, tenant: Tenant, other: Tenant, child: str, write_chat_rows: Callable[..., object]
) -> None:
    from control_plane.datasets.uploads import uploaded_files
    from control_plane.jobs import service as jobs
    from control_plane.jobs.submission import JobRequest

    with open(str(write_chat_rows()), "rb") as rows:
        file = uploaded_files.create(platform, other.id, rows, filename="rows.jsonl", purpose="fine-tune")
    job = jobs.submit(platform, other.id, JobRequest.from_body({"model": "tiny-base", "training_file": file.id})).job
    values = {
        "attempts": {"attempt": 1, "workload": "w"},
        "checkpoints": {
            "id": f"c-{job.id}", "attempt": 1, "step": 1, "object_prefix": "x", "manifest_sha256": "x", "metrics": {},
            "created_at": platform.clock(),
        },
        "job_events": {"id": f"e-{job.id}", "level": "info", "type": "message", "message": "m", "created_at": platform.clock()},
    }[child]  # fmt: skip
    table = declared_tables().tables[child]
    with platform.engine.begin() as conn:
        conn.execute(sa.insert(table).values(job_id=job.id, **values))
    count = sa.select(sa.func.count()).select_from(table).where(table.c.job_id == job.id)
    with platform.in_scope_of(tenant.id, KEY).engine.connect() as mine, platform.in_scope_of(other.id, KEY).engine.connect() as theirs:
        assert mine.execute(count).scalar_one() == 0
        assert theirs.execute(count).scalar_one() >= 1
