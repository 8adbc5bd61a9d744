"""Members and operators, uploads in parts, the outbox, quotas' holds, and a ledger with two sides.

Revision ID: 0011
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


TABLES = (
    "checkpoint_permissions", "loose_objects", "upload_parts", "refund_cases", "quota_notices", "quota_holds", "unbilled_attempts",
    "meter_events", "uploads", "invoice_entries", "ledger_postings", "deliveries", "budget_alerts", "webhook_endpoints",
    "storage_samples", "outbox", "members", "invoices", "budgets", "operator_keys", "audit_log",
)  # fmt: skip
"""New ones, each before those that it refers to."""


def _time(name: str, *, nullable: bool = False) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def upgrade() -> None:
    _tenancy()
    _data()
    _notices()
    _money()
    _metering()
    _columns()


def downgrade() -> None:
    _check_undoable()
    op.drop_column("sweeps", "waits")
    op.drop_column("jobs", "capped_at")
    for column in ("suspended_reason", "suspended_at", "requests_per_minute", "hard_gpu_hours", "soft_gpu_hours"):
        op.drop_column("tenants", column)
    op.drop_index("ix_ledger_entries_tenant_created", table_name="ledger_entries")
    op.drop_index("ix_ledger_entries_tenant_occurred", table_name="ledger_entries")
    op.drop_index("ix_ledger_entries_job_id", table_name="ledger_entries")
    op.create_index(op.f("ix_ledger_entries_tenant_id"), "ledger_entries", ["tenant_id"])
    op.alter_column(
        "ledger_entries", "gpu_seconds", existing_type=sa.DOUBLE_PRECISION(precision=53), server_default=None, existing_nullable=False
    )
    op.alter_column("ledger_entries", "gpu_type", existing_type=sa.TEXT(), nullable=False)
    op.alter_column("ledger_entries", "attempt", existing_type=sa.INTEGER(), nullable=False)
    op.alter_column("ledger_entries", "job_id", existing_type=sa.TEXT(), nullable=False)
    for column in ("occurred_at", "list_micros", "pricing"):
        op.drop_column("ledger_entries", column)
    op.drop_index("ix_jobs_open", "jobs")
    op.drop_column("jobs", "trace_parent")
    op.drop_index("ix_files_expiring", table_name="files")
    op.drop_column("files", "expires_at")
    op.drop_constraint(op.f("fk_api_keys_member_id"), "api_keys", type_="foreignkey")
    op.drop_column("api_keys", "names_owners")
    op.drop_column("api_keys", "requests_per_minute")
    op.drop_column("api_keys", "member_id")
    for table in TABLES:
        op.drop_table(table)


def _check_undoable() -> None:
    """Before this revision every entry was of a job's attempt: bills of storage and adjustments have no place there."""
    found = (
        op.get_bind().execute(sa.text("SELECT count(*), string_agg(DISTINCT kind, ', ') FROM ledger_entries WHERE job_id IS NULL")).one()
    )
    if found[0]:
        raise RuntimeError(
            f"revision 0011 cannot be undone: {found[0]} ledger entries ({found[1]}) are of no job, and the older schema cannot hold them. "
            "Upgrade again and stay, or restore a backup from before the upgrade"
        )


def _columns() -> None:
    op.add_column("jobs", _time("capped_at", nullable=True))
    op.add_column("sweeps", sa.Column("waits", JSONB))
    op.add_column("api_keys", sa.Column("member_id", sa.Text))
    op.add_column("api_keys", sa.Column("requests_per_minute", sa.Integer))
    op.add_column("api_keys", sa.Column("names_owners", sa.Boolean, nullable=False, server_default=sa.false()))
    op.execute("UPDATE api_keys SET names_owners = scopes @> '[\"admin\"]'")  # until now every key was the tenant's own
    op.create_foreign_key(op.f("fk_api_keys_member_id"), "api_keys", "members", ["member_id"], ["id"])
    op.add_column("jobs", sa.Column("trace_parent", sa.Text))
    is_open = sa.text("state NOT IN ('succeeded', 'failed', 'cancelled')")
    op.create_index("ix_jobs_open", "jobs", ["tenant_id"], postgresql_where=is_open)
    op.add_column("files", _time("expires_at", nullable=True))
    op.create_index("ix_files_expiring", "files", ["expires_at"], postgresql_where=sa.text("deleted_at IS NULL AND expires_at IS NOT NULL"))
    op.add_column("ledger_entries", sa.Column("pricing", sa.Text))
    op.add_column("ledger_entries", sa.Column("list_micros", sa.BigInteger))
    op.add_column("ledger_entries", _time("occurred_at", nullable=True))
    _carry_over()
    op.alter_column("ledger_entries", "job_id", existing_type=sa.TEXT(), nullable=True)
    op.alter_column("ledger_entries", "attempt", existing_type=sa.INTEGER(), nullable=True)
    op.alter_column("ledger_entries", "gpu_type", existing_type=sa.TEXT(), nullable=True)
    op.alter_column(
        "ledger_entries", "gpu_seconds", existing_type=sa.DOUBLE_PRECISION(precision=53), server_default="0", existing_nullable=False
    )
    op.drop_index(op.f("ix_ledger_entries_tenant_id"), table_name="ledger_entries")
    op.create_index("ix_ledger_entries_job_id", "ledger_entries", ["job_id"])
    op.create_index("ix_ledger_entries_tenant_occurred", "ledger_entries", ["tenant_id", "occurred_at"])
    op.create_index("ix_ledger_entries_tenant_created", "ledger_entries", ["tenant_id", "created_at"])
    op.add_column("tenants", sa.Column("soft_gpu_hours", sa.Float))
    op.add_column("tenants", sa.Column("hard_gpu_hours", sa.Float))
    op.add_column("tenants", sa.Column("requests_per_minute", sa.Integer))
    op.add_column("tenants", _time("suspended_at", nullable=True))
    op.add_column("tenants", sa.Column("suspended_reason", sa.Text))


def _carry_over() -> None:
    """Entries of before: on demand, at the time at which they were written, and with their other side; and the holds of open jobs."""
    op.execute("UPDATE ledger_entries SET list_micros = amount_micros, occurred_at = created_at, pricing = 'on_demand'")
    op.alter_column("ledger_entries", "list_micros", nullable=False)
    op.alter_column("ledger_entries", "occurred_at", nullable=False)
    op.execute(
        "INSERT INTO ledger_postings (entry_id, account, tenant_id, amount_micros) "
        "SELECT id, 'receivable/' || tenant_id, tenant_id, amount_micros FROM ledger_entries UNION ALL "
        "SELECT id, CASE kind WHEN 'refund' THEN 'refunds' ELSE 'revenue/gpu' END, tenant_id, -amount_micros FROM ledger_entries"
    )
    op.execute(  # what open jobs were expected to take; those that are not prepared yet get theirs when they are
        "INSERT INTO quota_holds (job_id, tenant_id, gpu_seconds, counted, created_at) "
        "SELECT id, tenant_id, expected_s * num_gpus, true, created_at FROM jobs "
        "WHERE expected_s IS NOT NULL AND state NOT IN ('succeeded', 'failed', 'cancelled', 'evaluating')"
    )


def _tenancy() -> None:
    op.create_table(
        "audit_log",
        sa.Column("seq", sa.BigInteger, sa.Identity(), nullable=False),
        sa.Column("tenant_id", sa.Text),
        sa.Column("actor_kind", sa.Text, nullable=False),
        sa.Column("actor_id", sa.Text, nullable=False),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("object_type", sa.Text, nullable=False),
        sa.Column("object_id", sa.Text, nullable=False),
        sa.Column("changes", JSONB, nullable=False),
        sa.Column("ip", sa.Text),
        sa.Column("user_agent", sa.Text),
        sa.Column("request_id", sa.Text),
        _time("created_at"),
        _time("redacted_at", nullable=True),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_audit_log")),
    )
    op.create_index("ix_audit_log_object", "audit_log", ["object_id", "seq"])
    op.create_index("ix_audit_log_tenant_seq", "audit_log", ["tenant_id", "seq"])
    op.create_table(
        "operator_keys",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("sha256", sa.Text, nullable=False),
        sa.Column("hint", sa.Text, nullable=False),
        _time("created_at"),
        _time("expires_at", nullable=True),
        _time("revoked_at", nullable=True),
        _time("last_used_at", nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_operator_keys")),
        sa.UniqueConstraint("sha256", name=op.f("uq_operator_keys_sha256")),
    )
    op.create_table(
        "members",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("email", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("notify", sa.Boolean, server_default=sa.true(), nullable=False),
        _time("created_at"),
        _time("removed_at", nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_members_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_members")),
    )
    op.create_index(
        "uq_members_email",
        "members",
        ["tenant_id", sa.literal_column("lower(email)")],
        unique=True,
        postgresql_where=sa.text("removed_at IS NULL"),
    )


def _data() -> None:
    op.create_table(
        "uploads",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("filename", sa.Text, nullable=False),
        sa.Column("purpose", sa.Text, nullable=False),
        sa.Column("mime_type", sa.Text, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("settings", JSONB, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("file_id", sa.Text),
        _time("created_at"),
        _time("expires_at"),
        _time("finished_at", nullable=True),
        sa.ForeignKeyConstraint(["file_id"], ["files.id"], name=op.f("fk_uploads_file_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_uploads_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_uploads")),
    )
    op.create_index("ix_uploads_pending", "uploads", ["expires_at"], postgresql_where=sa.text("status = 'pending'"))
    op.create_index("ix_uploads_tenant_created", "uploads", ["tenant_id", "created_at"])
    op.create_table(
        "upload_parts",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("upload_id", sa.Text, nullable=False),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("sha256", sa.Text, nullable=False),
        sa.Column("object_key", sa.Text, nullable=False),
        _time("created_at"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_upload_parts_tenant_id")),
        sa.ForeignKeyConstraint(["upload_id"], ["uploads.id"], name=op.f("fk_upload_parts_upload_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_upload_parts")),
    )
    op.create_index(op.f("ix_upload_parts_upload_id"), "upload_parts", ["upload_id"])
    op.create_table(
        "loose_objects",
        sa.Column("object_key", sa.Text, nullable=False),
        sa.Column("tenant_id", sa.Text, nullable=False),
        _time("due_at"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_loose_objects_tenant_id")),
        sa.PrimaryKeyConstraint("object_key", name=op.f("pk_loose_objects")),
    )
    op.create_index("ix_loose_objects_due_at", "loose_objects", ["due_at"])
    op.create_table(
        "checkpoint_permissions",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("checkpoint_id", sa.Text, nullable=False),
        sa.Column("project_id", sa.Text, nullable=False),
        _time("created_at"),
        sa.ForeignKeyConstraint(["checkpoint_id"], ["checkpoints.id"], name=op.f("fk_checkpoint_permissions_checkpoint_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_checkpoint_permissions_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_checkpoint_permissions")),
        sa.UniqueConstraint("checkpoint_id", "project_id", name=op.f("uq_checkpoint_permissions_checkpoint_id_project_id")),
    )


def _notices() -> None:
    op.create_table(
        "outbox",
        sa.Column("seq", sa.BigInteger, sa.Identity(), nullable=False),
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("data", JSONB, nullable=False),
        _time("created_at"),
        _time("fanned_out_at", nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_outbox_tenant_id")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_outbox")),
        sa.UniqueConstraint("id", name=op.f("uq_outbox_id")),
    )
    op.create_index("ix_outbox_tenant_seq", "outbox", ["tenant_id", "seq"])
    op.create_index("ix_outbox_waiting", "outbox", ["seq"], postgresql_where=sa.text("fanned_out_at IS NULL"))
    op.create_table(
        "webhook_endpoints",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("event_types", JSONB, nullable=False),
        sa.Column("secrets", JSONB, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("disabled_reason", sa.Text),
        _time("failing_since", nullable=True),
        _time("created_at"),
        _time("updated_at"),
        _time("deleted_at", nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_webhook_endpoints_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_endpoints")),
    )
    op.create_index("ix_webhook_endpoints_tenant_id", "webhook_endpoints", ["tenant_id"])
    op.create_table(
        "deliveries",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("channel", sa.Text, nullable=False),
        sa.Column("target", sa.Text, nullable=False),
        sa.Column("event_seq", sa.BigInteger, nullable=False),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("attempts", sa.Integer, server_default="0", nullable=False),
        sa.Column("claims", sa.Integer, server_default="0", nullable=False),
        sa.Column("last_status", sa.Integer),
        sa.Column("last_error", sa.Text),
        _time("created_at"),
        _time("next_attempt_at"),
        _time("claimed_until", nullable=True),
        _time("last_attempt_at", nullable=True),
        _time("delivered_at", nullable=True),
        sa.ForeignKeyConstraint(["event_seq"], ["outbox.seq"], name=op.f("fk_deliveries_event_seq")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_deliveries_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_deliveries")),
        sa.UniqueConstraint("event_seq", "target", name=op.f("uq_deliveries_event_seq_target")),
    )
    op.create_index("ix_deliveries_due", "deliveries", ["target", "next_attempt_at"], postgresql_where=sa.text("state = 'pending'"))
    op.create_index(
        "ix_deliveries_in_order", "deliveries", ["target", "subject", "event_seq"], postgresql_where=sa.text("state = 'pending'")
    )
    op.create_index("ix_deliveries_claimed", "deliveries", ["claimed_until"], postgresql_where=sa.text("claimed_until IS NOT NULL"))
    op.create_index("ix_deliveries_dead", "deliveries", ["created_at"], postgresql_where=sa.text("state = 'dead'"))
    op.create_index("ix_deliveries_target_created", "deliveries", ["target", "created_at", "id"])


def _money() -> None:
    op.create_table(
        "budgets",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("limit_micros", sa.BigInteger, nullable=False),
        sa.Column("thresholds", JSONB, nullable=False),
        _time("created_at"),
        _time("updated_at"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_budgets_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_budgets")),
        sa.UniqueConstraint("tenant_id", "name", name=op.f("uq_budgets_tenant_id_name")),
    )
    op.create_table(
        "invoices",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("month", sa.Text, nullable=False),
        sa.Column("total_micros", sa.BigInteger, nullable=False),
        sa.Column("document", JSONB, nullable=False),
        sa.Column("sha256", sa.Text, nullable=False),
        _time("issued_at"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_invoices_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_invoices")),
        sa.UniqueConstraint("tenant_id", "month", name=op.f("uq_invoices_tenant_id_month")),
    )
    op.create_table(
        "storage_samples",
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("day", sa.Date, nullable=False),
        sa.Column("bytes", JSONB, nullable=False),
        _time("created_at"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_storage_samples_tenant_id")),
        sa.PrimaryKeyConstraint("tenant_id", "day", name=op.f("pk_storage_samples")),
    )
    op.create_table(
        "budget_alerts",
        sa.Column("budget_id", sa.Text, nullable=False),
        sa.Column("month", sa.Text, nullable=False),
        sa.Column("threshold", sa.Integer, nullable=False),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("spent_micros", sa.BigInteger, nullable=False),
        _time("created_at"),
        sa.ForeignKeyConstraint(["budget_id"], ["budgets.id"], name=op.f("fk_budget_alerts_budget_id"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_budget_alerts_tenant_id")),
        sa.PrimaryKeyConstraint("budget_id", "month", "threshold", name=op.f("pk_budget_alerts")),
    )
    op.create_table(
        "ledger_postings",
        sa.Column("entry_id", sa.Text, nullable=False),
        sa.Column("account", sa.Text, nullable=False),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("amount_micros", sa.BigInteger, nullable=False),
        sa.ForeignKeyConstraint(["entry_id"], ["ledger_entries.id"], name=op.f("fk_ledger_postings_entry_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_ledger_postings_tenant_id")),
        sa.PrimaryKeyConstraint("entry_id", "account", name=op.f("pk_ledger_postings")),
    )
    op.create_index("ix_ledger_postings_account", "ledger_postings", ["account"])
    op.create_table(
        "invoice_entries",
        sa.Column("entry_id", sa.Text, nullable=False),
        sa.Column("invoice_id", sa.Text, nullable=False),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.ForeignKeyConstraint(["entry_id"], ["ledger_entries.id"], name=op.f("fk_invoice_entries_entry_id")),
        sa.ForeignKeyConstraint(["invoice_id"], ["invoices.id"], name=op.f("fk_invoice_entries_invoice_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_invoice_entries_tenant_id")),
        sa.PrimaryKeyConstraint("entry_id", name=op.f("pk_invoice_entries")),
    )
    op.create_index(op.f("ix_invoice_entries_invoice_id"), "invoice_entries", ["invoice_id"])


def _metering() -> None:
    op.create_table(
        "meter_events",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("data", JSONB, nullable=False),
        _time("at"),
        _time("received_at"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_meter_events_job_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_meter_events_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_meter_events")),
    )
    op.create_index("ix_meter_events_attempt", "meter_events", ["job_id", "attempt"])
    op.create_index("ix_meter_events_tenant_at", "meter_events", ["tenant_id", "at"])
    op.create_table(
        "unbilled_attempts",
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_unbilled_attempts_job_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_unbilled_attempts_tenant_id")),
        sa.PrimaryKeyConstraint("job_id", "attempt", name=op.f("pk_unbilled_attempts")),
    )
    op.create_table(
        "quota_holds",
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("gpu_seconds", sa.Float, nullable=False),
        sa.Column("counted", sa.Boolean, nullable=False),
        _time("created_at"),
        _time("released_at", nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_quota_holds_job_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_quota_holds_tenant_id")),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_quota_holds")),
    )
    op.create_index("ix_quota_holds_open", "quota_holds", ["tenant_id"], postgresql_where=sa.text("released_at IS NULL"))
    op.create_table(
        "quota_notices",
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("month", sa.Text, nullable=False),
        sa.Column("quota", sa.Text, nullable=False),
        sa.Column("percent", sa.Integer, nullable=False),
        sa.Column("gpu_hours", sa.Float, nullable=False),
        _time("created_at"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_quota_notices_tenant_id")),
        sa.PrimaryKeyConstraint("tenant_id", "month", "quota", "percent", "gpu_hours", name=op.f("pk_quota_notices")),
    )
    op.create_table(
        "refund_cases",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("amount_micros", sa.BigInteger, nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("decided_by", sa.Text),
        sa.Column("note", sa.Text),
        _time("created_at"),
        _time("decided_at", nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_refund_cases_job_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_refund_cases_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_refund_cases")),
    )
    op.create_index("ix_refund_cases_pending", "refund_cases", ["created_at"], postgresql_where=sa.text("state = 'pending'"))
