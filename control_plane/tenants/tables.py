"""Tenants, members, keys, operators, and the audit log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from control_plane.platform.tables import metadata, owner, timestamp
from control_plane.tenants.rules import TIERS, Role

tenants = sa.Table(
    "tenants", metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("tier", sa.Text, nullable=False),
    sa.Column("max_jobs_in_flight", sa.Integer, nullable=False),
    sa.Column("soft_gpu_hours", sa.Float), sa.Column("hard_gpu_hours", sa.Float),  # per month; null: those of the tier
    sa.Column("requests_per_minute", sa.Integer),  # of each key; null: that of the tier
    timestamp("suspended_at", nullable=True), sa.Column("suspended_reason", sa.Text),
    timestamp("created_at"), timestamp("closed_at", nullable=True),
)  # fmt: skip


def _own_or_of_tier(name: str) -> sa.ColumnElement[Any]:
    of_tier = sa.case({tier.name: getattr(tier, name) for tier in TIERS.values()}, value=tenants.c.tier)
    return sa.func.coalesce(tenants.c[name], of_tier).label(name)


TENANT = [
    *(tenants.c[name] for name in ("id", "name", "tier", "max_jobs_in_flight", "suspended_at", "suspended_reason", "closed_at")),
    *(_own_or_of_tier(name) for name in ("soft_gpu_hours", "hard_gpu_hours", "requests_per_minute")),
]
"""Columns of a :class:`~control_plane.tenants.rules.Tenant`, with its effective limits."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    id: str
    email: str
    name: str
    role: Role
    notify: bool
    created_at: datetime
    removed_at: datetime | None


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiKey:
    """A key without its hash."""

    id: str
    tenant_id: str
    member_id: str | None
    name: str
    hint: str
    scopes: tuple[str, ...]
    requests_per_minute: int | None
    names_owners: bool
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


console_sessions = sa.Table(
    "console_sessions", metadata,
    sa.Column("sha256", sa.Text, primary_key=True),  # of the secret in the browser's cookie
    sa.Column("key_id", sa.Text, sa.ForeignKey("api_keys.id", ondelete="CASCADE"), index=True),
    sa.Column("member_id", sa.Text, sa.ForeignKey("members.id", ondelete="CASCADE"), index=True),
    sa.Column("operator_key_id", sa.Text, sa.ForeignKey("operator_keys.id", ondelete="CASCADE"), index=True),
    sa.Column("operator_email", sa.Text), sa.Column("operator_grant", sa.Text),  # an entry of FT_OIDC_OPERATORS
    timestamp("created_at"), sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False, index=True),
)  # fmt: skip
"""Browsers that are signed in to the console: with a key, or without one as a member or an operator. A session can do what that key or
person can, and ends with it."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorKey:
    """An operator's key without its hash."""

    id: str
    name: str
    hint: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


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
    sa.Column("position", sa.BigInteger, unique=True),  # in the chain (tenants/audit); null until the worker placed it
    sa.Column("previous_sha256", sa.Text), sa.Column("salt", sa.Text), sa.Column("content_sha256", sa.Text), sa.Column("sha256", sa.Text),
    sa.Index("ix_audit_log_tenant_seq", "tenant_id", "seq"),
    sa.Index("ix_audit_log_unplaced", "seq", postgresql_where=sa.text("position IS NULL")),
    sa.Index("ix_audit_log_object", "object_id", "seq"),
)  # fmt: skip
"""Written by a trigger in the transaction of the change, for every watched table. Lines are never changed or deleted, except that each gets
its place in the chain, and for quoted tenant data when that data is deleted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditLine:
    seq: int
    tenant_id: str | None
    actor_kind: str
    actor_id: str
    actor_name: str | None
    """Name of the key or operator; None for the system, and for deleted keys."""
    member_id: str | None
    email: str | None
    action: str
    object_type: str
    object_id: str
    changes: Mapping[str, Any]
    ip: str | None
    user_agent: str | None
    request_id: str | None
    created_at: datetime
    redacted_at: datetime | None

    @property
    def id(self) -> str:
        return f"aud_{self.seq}"

    @property
    def actor(self) -> Self:
        """The same line, as responses show its actor: in an object of its own."""
        return self
