"""The first schema: tables, the rules that the database enforces, and who may read and write what.

Calls of the API run as the role ``ft_tenant`` with ``ft.tenant`` set for the transaction, so a query sees the rows of one tenant, whatever
it forgot to say. The platform's processes and its operators connect as two other roles. None of the three is a superuser, owns a table or
bypasses row security, so ``RESET ROLE`` and ``SET ROLE`` lead nowhere; only the owner, who migrates, can do more.

Revision ID: initial_15
"""

from collections.abc import Mapping
from pathlib import Path

import sqlalchemy as sa
from alembic import op
from procrastinate.schema import SchemaManager

revision = "initial_15"
down_revision = None

FILES = Path(__file__).parent.parent / "initial"
PLATFORM, OPERATOR, TENANT = "ft_platform", "ft_operator", "ft_tenant"
TASKS = "tasks"
"""Schema of the task queue."""
SAFE = "LOGIN NOSUPERUSER NOBYPASSRLS NOCREATEDB NOCREATEROLE NOREPLICATION"

OWN = "tenant_id = current_setting('ft.tenant', true)"
OF_A_TENANT = """
    adapters api_keys audit_log budget_alerts budgets checkpoint_permissions datasets deletion_requests deletions deliveries evaluations
    exports files idempotency_keys integrations invoice_entries invoices jobs ledger_entries ledger_postings loose_objects members
    meter_events model_routes outbox quota_holds quota_notices refund_cases storage_samples sweeps unbilled_attempts upload_parts uploads
    webhook_endpoints
"""
"""Tables of which a tenant's call sees the rows of its tenant."""
SHARED = ("eval_scores", "eval_suites")
"""It also sees the rows of no tenant, which it cannot write."""
CHILDREN = {
    **dict.fromkeys(("job_events", "health_verdicts", "reservations", "attempts", "checkpoints", "wandb_runs"), ("job_id", "jobs")),
    "sweep_trials": ("sweep_id", "sweeps"),
    "deployments": ("adapter_id", "adapters"),
    "replica_adapters": ("adapter_id", "adapters"),
    "deletion_objects": ("deletion_id", "deletion_requests"),
}
"""Tables without a tenant of their own: their rows belong to whom the row belongs that they refer to."""
READ_ONLY = {"alembic_version", "adapter_stage_moves"}
"""Read by triggers and by whoever asks for the schema's revision."""
OF_OPERATORS = {"recipes"}
"""Written by operators, read by every call of a tenant."""
ADD_ONLY = {"ledger_entries", "ledger_postings", "invoices", "invoice_entries", "meter_events"}
"""Also to the platform: an entry is corrected by another entry."""
PLATFORM_COLUMNS = {
    "audit_log": "redacted_at changes ip user_agent",  # triggers add its lines; a deletion of data takes out what they quote
    "operator_keys": "last_used_at",
}
"""Columns that the platform's processes may update, of tables that they may not write otherwise."""
WRITTEN_BY_TENANTS = {
    "adapters": (
        "",
        "approval approval_note approved_at approved_by deprecated_at promoted_at stage",
        False,
    ),
    "api_keys": (
        "created_at expires_at hint id member_id name names_owners requests_per_minute scopes sha256 tenant_id",
        "expires_at revoked_at",
        False,
    ),
    "budgets": (
        "created_at id limit_micros name tenant_id thresholds updated_at",
        "limit_micros name thresholds updated_at",
        True,
    ),
    "checkpoint_permissions": (
        "checkpoint_id created_at id project_id tenant_id",
        "",
        True,
    ),
    "datasets": (
        "content_sha256 created_at format id name report review row_count tenant_id uri version",
        "approved_at approved_by cooled_at report review",
        False,
    ),
    "deletion_requests": (
        "id reason requested_at requested_by subject_id subject_kind tenant_id",
        "",
        False,
    ),
    "deliveries": (
        "",
        "attempts delivered_at last_error next_attempt_at state",
        False,
    ),
    "deployments": (
        "adapter_id desired desired_at detail name observed updated_at",
        "desired desired_at detail observed updated_at",
        False,
    ),
    "eval_suites": (
        "created_at field id name num_items object_key sha256 tenant_id",
        "",
        True,
    ),
    "evaluations": (
        "adapter_id base_digest base_model created_at eval_config id job_id kind state tenant_id",
        "",
        False,
    ),
    "exports": (
        "id tenant_id adapter_id key format precision created_at status error progress claim beat_at finished_at",
        "status error progress claim beat_at finished_at",
        True,
    ),
    "files": (
        "bytes column_map created_at expires_at filename hub_token_given id model object_key policies purpose sha256 source "
        "status tenant_id",
        "dataset_id deleted_at progress report status status_code status_details",
        False,
    ),
    "idempotency_keys": (
        "created_at job_id key request_sha256 tenant_id",
        "created_at job_id request_sha256",
        False,
    ),
    "integrations": (
        "created_at hint sealed_key tenant_id type updated_at",
        "hint sealed_key updated_at",
        True,
    ),
    "job_events": (
        "code created_at data id job_id level message type",
        "",
        False,
    ),
    "jobs": (
        "base_digest created_at dataset_id hyperparameters id metadata method model recipe request request_sha256 seed state suffix "
        "tenant_id tier trace_parent training_file validation_file warm_start",
        "ahead checkpointing due_at estimated_finish_at expected_start_at finished_at promise queue_position queued_at reason "
        "reason_detail state stop_requested waited_s waiting_since",
        False,
    ),
    "loose_objects": (
        "due_at object_key tenant_id",
        "due_at",
        True,
    ),
    "members": (
        "created_at email id name role tenant_id",
        "name notify removed_at role",
        False,
    ),
    "model_routes": (
        "created_at name targets tenant_id updated_at",
        "targets updated_at",
        True,
    ),
    "outbox": (
        "created_at data id subject tenant_id type",
        "",
        False,
    ),
    "quota_holds": (
        "counted created_at gpu_seconds job_id tenant_id",
        "counted gpu_seconds released_at",
        False,
    ),
    "replica_adapters": (
        "",
        "failures observed",
        False,
    ),
    "sweep_trials": (
        "number parameters sweep_id",
        "error job_id reused",
        False,
    ),
    "sweeps": (
        "created_at id request settings tenant_id",
        "cancelled_at submitted_at waits",
        False,
    ),
    "tenants": (
        "",
        "id",
        False,
    ),
    "upload_parts": (
        "bytes created_at id object_key sha256 tenant_id upload_id",
        "",
        True,
    ),
    "uploads": (
        "bytes created_at expires_at filename id mime_type purpose settings status tenant_id",
        "expires_at file_id finished_at status",
        False,
    ),
    "wandb_runs": (
        "job_id next_at",
        "",
        False,
    ),
    "webhook_endpoints": (
        "created_at event_types id name sealed_url secrets state tenant_id updated_at url",
        "deleted_at disabled_reason event_types failing_since name sealed_url secrets state updated_at url",
        False,
    ),
}
"""By table: columns that a tenant's call fills in new rows, columns that it updates, whether it may delete its rows. `tenants.id`
cannot change within row security; locking the row takes the right to update a column."""


def upgrade() -> None:
    cursor = op.get_bind().connection.cursor()
    cursor.execute((FILES / "tables.sql").read_text())
    cursor.execute((FILES / "rules.sql").read_text())
    cursor.execute(f"CREATE SCHEMA {TASKS}; SET LOCAL search_path = {TASKS}; {SchemaManager.get_schema()}; SET LOCAL search_path = public")
    cursor.execute((FILES / "tasks.sql").read_text())
    _make_roles()
    _allow_platform()
    _confine_tenants()
    _share_tasks()


def _make_roles() -> None:
    for role in (PLATFORM, OPERATOR, TENANT):
        op.execute(MAKE_ROLE.format(role=role, attributes=SAFE))
    op.execute(MAKE_MEMBER)
    op.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")  # before PostgreSQL 15 all may; triggers run there as the owner


def _allow_platform() -> None:
    for table in sa.inspect(op.get_bind()).get_table_names():
        op.execute(f"GRANT {_verbs(table)} ON {table} TO {PLATFORM}")
    for table, columns in PLATFORM_COLUMNS.items():
        op.execute(f"GRANT UPDATE ({_list(columns)}) ON {table} TO {PLATFORM}")
    for table in sorted(OF_OPERATORS | {"operator_keys"}):
        op.execute(f"GRANT INSERT, UPDATE, DELETE ON {table} TO {OPERATOR}")
    op.execute(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {PLATFORM}")


def _confine_tenants() -> None:
    confine("tenants", "id = current_setting('ft.tenant', true)")
    for table in OF_A_TENANT.split():
        confine(table, OWN)
    for table in SHARED:
        confine(table, f"{OWN} OR tenant_id IS NULL", writes=OWN)
    for table, (column, parent) in CHILDREN.items():
        confine(table, f"EXISTS (SELECT FROM {parent} p WHERE p.id = {table}.{column} AND p.{OWN})")
    for table in sorted(READ_ONLY | OF_OPERATORS):
        op.execute(f"GRANT SELECT ON {table} TO {TENANT}")
    allow_tenants(WRITTEN_BY_TENANTS)


def allow_tenants(written: Mapping[str, tuple[str, str, bool]]) -> None:
    """Grant what `WRITTEN_BY_TENANTS` of this or a later migration says."""
    for table, (inserted, updated, deletes) in written.items():
        for verb, columns in (("INSERT", inserted), ("UPDATE", updated)):
            if columns:
                op.execute(f"GRANT {verb} ({_list(columns)}) ON {table} TO {TENANT}")
        if deletes:
            op.execute(f"GRANT DELETE ON {table} TO {TENANT}")


def _share_tasks() -> None:
    """Let all add tasks to the queue, and the platform work them off; a tenant's call reads none."""
    op.execute(f"GRANT USAGE ON SCHEMA {TASKS} TO {PLATFORM}, {TENANT}")
    op.execute(f"GRANT EXECUTE ON FUNCTION {TASKS}.defer(text, text, jsonb, text, text, timestamptz) TO {PLATFORM}, {TENANT}")
    op.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {TASKS} TO {PLATFORM}")
    op.execute(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA {TASKS} TO {PLATFORM}")


def confine(table: str, rows: str, *, writes: str = "") -> None:
    op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
    op.execute(f"CREATE POLICY of_platform ON {table} TO {PLATFORM} USING (true)")
    op.execute(f"CREATE POLICY of_tenant ON {table} TO {TENANT} USING ({rows}) WITH CHECK ({writes or rows})")
    op.execute(f"GRANT SELECT ON {table} TO {TENANT}")


def _verbs(table: str) -> str:
    if table in READ_ONLY | OF_OPERATORS or table in PLATFORM_COLUMNS:
        return "SELECT"
    return "SELECT, INSERT" if table in ADD_ONLY else "SELECT, INSERT, UPDATE, DELETE"


def _list(columns: str) -> str:
    return ", ".join(f'"{column}"' for column in columns.split())


MAKE_ROLE = """
DO $$ BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{role}') THEN
        CREATE ROLE {role} {attributes};
    ELSIF NOT (SELECT rolcanlogin FROM pg_roles WHERE rolname = '{role}') THEN
        ALTER ROLE {role} LOGIN;
    END IF;
EXCEPTION
    WHEN duplicate_object OR unique_violation THEN NULL;  -- another database of this server was migrated at the same moment
    WHEN insufficient_privilege THEN
        RAISE EXCEPTION 'no role {role} that can log in, and % may not make it; as a superuser run: %', current_user,
            CASE WHEN EXISTS (SELECT FROM pg_roles WHERE rolname = '{role}') THEN 'ALTER ROLE {role} LOGIN'
            ELSE 'CREATE ROLE {role} {attributes}' END USING ERRCODE = 'insufficient_privilege';
END $$
"""
MAKE_MEMBER = f"""
DO $$ BEGIN
    IF NOT pg_has_role('{OPERATOR}', '{PLATFORM}', 'MEMBER') THEN
        GRANT {PLATFORM} TO {OPERATOR};
    END IF;
EXCEPTION
    WHEN insufficient_privilege THEN
        RAISE EXCEPTION '{OPERATOR} is no member of {PLATFORM}, and % may not add it; as a superuser run: GRANT {PLATFORM} TO {OPERATOR}',
            current_user USING ERRCODE = 'insufficient_privilege';
END $$
"""
