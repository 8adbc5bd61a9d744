"""Row security: within a tenant's scope a query sees that tenant's rows, whatever it forgot to say.

Calls of the API run as the role ``ft_tenant`` with ``ft.tenant`` set for the transaction; the platform's own work runs as
the owner of the tables, to whom no policy applies.

Revision ID: 0012
"""

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

ROLE = "ft_tenant"
ALL, READ, ADD = "SELECT, INSERT, UPDATE, DELETE", "SELECT", "SELECT, INSERT"
OWN = "tenant_id = current_setting('ft.tenant', true)"
OWN_OR_SHARED = f"{OWN} OR tenant_id IS NULL"
TABLES = {
    "tenants": ("SELECT, UPDATE", "id = current_setting('ft.tenant', true)"),
    **dict.fromkeys(
        (
            "members",
            "api_keys",
            "idempotency_keys",
            "files",
            "uploads",
            "upload_parts",
            "loose_objects",
            "datasets",
            "jobs",
            "sweeps",
            "quota_holds",
            "checkpoint_permissions",
            "adapters",
            "model_routes",
            "evaluations",
            "exports",
            "budgets",
            "webhook_endpoints",
            "deliveries",
            "deletion_requests",
        ),
        (ALL, OWN),
    ),
    **dict.fromkeys(
        (
            "audit_log",
            "ledger_entries",
            "ledger_postings",
            "meter_events",
            "unbilled_attempts",
            "refund_cases",
            "storage_samples",
            "invoices",
            "invoice_entries",
            "budget_alerts",
            "quota_notices",
            "deletions",
        ),
        (READ, OWN),
    ),
    "outbox": (ADD, OWN),
    "eval_suites": (ALL, OWN_OR_SHARED),
    "eval_scores": (READ, OWN_OR_SHARED),
}
"""What the role may do with each table, and with which of its rows."""
CHILDREN = {
    **dict.fromkeys(("job_events", "health_verdicts", "reservations", "attempts", "checkpoints"), ("job_id", "jobs")),
    "sweep_trials": ("sweep_id", "sweeps"),
    "deployments": ("adapter_id", "adapters"),
    "replica_adapters": ("adapter_id", "adapters"),
    "deletion_objects": ("deletion_id", "deletion_requests"),
}
"""Tables without a tenant of their own: their rows belong to whom the row belongs that they refer to."""
LOOKED_UP = ("adapter_stage_moves", "alembic_version")
"""Read by triggers, and by whoever asks for the schema's revision; nobody's rows."""


def upgrade() -> None:
    op.execute(MAKE_ROLE)
    for table, (verbs, rows) in TABLES.items():
        _confine(table, verbs, rows, _written(rows))
    for table, (column, parent) in CHILDREN.items():
        rows = f"EXISTS (SELECT FROM {parent} p WHERE p.id = {table}.{column} AND p.{OWN})"
        _confine(table, ALL, rows, rows)
    for table in LOOKED_UP:
        op.execute(f"GRANT SELECT ON {table} TO {ROLE}")


def downgrade() -> None:
    for table in (*TABLES, *CHILDREN):
        op.execute(f"DROP POLICY of_tenant ON {table}")
        op.execute(f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")
        op.execute(f"REVOKE ALL ON {table} FROM {ROLE}")
    for table in LOOKED_UP:
        op.execute(f"REVOKE ALL ON {table} FROM {ROLE}")  # the role itself belongs to the server, not to this database


def _confine(table: str, verbs: str, rows: str, written: str) -> None:
    op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
    op.execute(f"CREATE POLICY of_tenant ON {table} TO {ROLE} USING ({rows}) WITH CHECK ({written})")
    op.execute(f"GRANT {verbs} ON {table} TO {ROLE}")


def _written(rows: str) -> str:
    """What is shared is written by nobody in a tenant's scope."""
    return rows.removesuffix(" OR tenant_id IS NULL")


MAKE_ROLE = f"""
DO $$ BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{ROLE}') THEN
        CREATE ROLE {ROLE} NOLOGIN;
    END IF;
    IF NOT pg_has_role(current_user, '{ROLE}', 'MEMBER') THEN
        GRANT {ROLE} TO CURRENT_USER;
    END IF;
EXCEPTION
    WHEN duplicate_object OR unique_violation THEN NULL;  -- another database of this server was migrated at the same moment
    WHEN insufficient_privilege THEN
        RAISE EXCEPTION 'no role {ROLE}, and % may not make it; as a superuser run: CREATE ROLE {ROLE} NOLOGIN; GRANT {ROLE} TO %',
            current_user, current_user USING ERRCODE = 'insufficient_privilege';
END $$
"""
