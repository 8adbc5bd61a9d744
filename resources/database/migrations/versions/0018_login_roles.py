"""Login roles: the platform, its operators and its tenants each connect as a role that can do no more than its work.

No role is a superuser, owns a table, or bypasses row security, so ``RESET ROLE`` and ``SET ROLE`` lead nowhere. Tenants' calls write the
columns listed here and no others.

Revision ID: 0018
"""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

PLATFORM, OPERATOR, TENANT = "ft_platform", "ft_operator", "ft_tenant"
SAFE = "LOGIN NOSUPERUSER NOBYPASSRLS NOCREATEDB NOCREATEROLE NOREPLICATION"
READ_ONLY = {"alembic_version", "adapter_stage_moves"}
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
        "approval approval_note approved_at approved_by deprecated_at stage",
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
        "attempts claimed_until claims delivered_at last_error next_attempt_at state",
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
    "job_events": (
        "code created_at data id job_id level message type",
        "",
        False,
    ),
    "jobs": (
        "base_digest created_at dataset_id hyperparameters id metadata method model request request_sha256 seed state suffix "
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
    "webhook_endpoints": (
        "created_at event_types id name sealed_url secrets state tenant_id updated_at url",
        "deleted_at disabled_reason event_types failing_since name sealed_url secrets state updated_at url",
        False,
    ),
}
"""By table: columns that a tenant's call fills in new rows, columns that it updates, whether it may delete its rows. `tenants.id`
cannot change within row security; locking the row takes the right to update a column."""


def upgrade() -> None:
    for role in (PLATFORM, OPERATOR, TENANT):
        op.execute(MAKE_ROLE.format(role=role, attributes=SAFE))
    op.execute(MAKE_MEMBER)
    op.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")  # before PostgreSQL 15 all may; triggers run there as the owner
    connection = op.get_bind()
    tables = connection.execute(
        sa.text("SELECT relname, relrowsecurity FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace")
    )
    for table, confined in tables.all():
        op.execute(f"GRANT {_verbs(table)} ON {table} TO {PLATFORM}")
        if confined:
            op.execute(f"CREATE POLICY of_platform ON {table} TO {PLATFORM} USING (true)")
    for table, columns in PLATFORM_COLUMNS.items():
        op.execute(f"GRANT UPDATE ({_list(columns)}) ON {table} TO {PLATFORM}")
    op.execute(f"GRANT INSERT, UPDATE, DELETE ON operator_keys TO {OPERATOR}")
    op.execute(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {PLATFORM}")
    op.execute(f"REVOKE INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public FROM {TENANT}")
    for table, (inserted, updated, deletes) in WRITTEN_BY_TENANTS.items():
        for verb, columns in (("INSERT", inserted), ("UPDATE", updated)):
            if columns:
                op.execute(f"GRANT {verb} ({_list(columns)}) ON {table} TO {TENANT}")
        if deletes:
            op.execute(f"GRANT DELETE ON {table} TO {TENANT}")


def downgrade() -> None:
    tables = op.get_bind().execute(sa.text("SELECT tablename FROM pg_policies WHERE policyname = 'of_platform'")).scalars().all()
    for table in tables:
        op.execute(f"DROP POLICY of_platform ON {table}")
    for role in (PLATFORM, OPERATOR):
        op.execute(f"REVOKE ALL ON ALL TABLES IN SCHEMA public FROM {role}")
        op.execute(f"REVOKE ALL ON ALL SEQUENCES IN SCHEMA public FROM {role}")
    for table in WRITTEN_BY_TENANTS:
        op.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO {TENANT}")


def _verbs(table: str) -> str:
    if table in READ_ONLY or table in PLATFORM_COLUMNS:
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
