"""Tenants, members, keys, operators, and the audit log."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from control_plane.platform.tables import metadata, owner, timestamp

tenants = sa.Table(
    "tenants", metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("tier", sa.Text, nullable=False),
    sa.Column("max_jobs_in_flight", sa.Integer, nullable=False),
    sa.Column("soft_gpu_hours", sa.Float), sa.Column("hard_gpu_hours", sa.Float),  # per month; null: those of the tier
    sa.Column("requests_per_minute", sa.Integer),  # of each key; null: that of the tier
    timestamp("suspended_at", nullable=True), sa.Column("suspended_reason", sa.Text),
    timestamp("created_at"),
)  # fmt: skip

members = sa.Table(
    "members", metadata,
    sa.Column("id", sa.Text, primary_key=True),  # mem_...
    owner(),
    sa.Column("email", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("role", sa.Text, nullable=False),  # owner | admin | member | viewer
    sa.Column("notify", sa.Boolean, nullable=False, server_default=sa.true()),  # by e-mail
    timestamp("created_at"), timestamp("removed_at", nullable=True),
    sa.Index(
        "uq_members_email", "tenant_id", sa.text("lower(email)"), unique=True, postgresql_where=sa.text("removed_at IS NULL")
    ),
)  # fmt: skip

api_keys = sa.Table(
    "api_keys", metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False, index=True),
    sa.Column("member_id", sa.Text, sa.ForeignKey("members.id")),  # its owner; null: the tenant's own, for machines
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("sha256", sa.Text, nullable=False, unique=True),
    sa.Column("hint", sa.Text, nullable=False),
    sa.Column("scopes", JSONB, nullable=False),
    sa.Column("requests_per_minute", sa.Integer),  # null: the tenant's
    # of a key without a member: it has scope admin, and an operator or an owner created it
    sa.Column("names_owners", sa.Boolean, nullable=False, server_default=sa.false()),
    timestamp("created_at"), timestamp("expires_at", nullable=True), timestamp("revoked_at", nullable=True),
    timestamp("last_used_at", nullable=True),
)  # fmt: skip

operator_keys = sa.Table(
    "operator_keys", metadata,
    sa.Column("id", sa.Text, primary_key=True),  # opk_...
    sa.Column("name", sa.Text, nullable=False),  # of the person or machine that holds it
    sa.Column("sha256", sa.Text, nullable=False, unique=True),
    sa.Column("hint", sa.Text, nullable=False),
    timestamp("created_at"), timestamp("expires_at", nullable=True), timestamp("revoked_at", nullable=True),
    timestamp("last_used_at", nullable=True),
)  # fmt: skip
"""Operators of the platform: tenants' keys do not open their routes, and theirs open no tenant's."""

idempotency_keys = sa.Table(
    "idempotency_keys", metadata,
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), primary_key=True),
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("request_sha256", sa.Text, nullable=False),
    sa.Column("job_id", sa.Text, nullable=False),
    timestamp("created_at"),
)  # fmt: skip

audit_log = sa.Table(
    "audit_log", metadata,
    sa.Column("seq", sa.BigInteger, sa.Identity(), primary_key=True),
    sa.Column("tenant_id", sa.Text),  # null: the platform itself; no foreign key, because a line outlives its subject
    sa.Column("actor_kind", sa.Text, nullable=False),  # key | operator | system
    sa.Column("actor_id", sa.Text, nullable=False),  # id of the key; for the system, the process
    sa.Column("action", sa.Text, nullable=False),  # <object_type>.created | .updated | .deleted
    sa.Column("object_type", sa.Text, nullable=False),
    sa.Column("object_id", sa.Text, nullable=False),
    sa.Column("changes", JSONB, nullable=False),  # by column: [old, new]
    sa.Column("ip", sa.Text), sa.Column("user_agent", sa.Text), sa.Column("request_id", sa.Text),
    timestamp("created_at"), timestamp("redacted_at", nullable=True),
    sa.Index("ix_audit_log_tenant_seq", "tenant_id", "seq"),
    sa.Index("ix_audit_log_object", "object_id", "seq"),
)  # fmt: skip
"""Written by a trigger in the transaction of the change, for every watched table. Lines are never changed or deleted, except for quoted
tenant data when that data is deleted."""
