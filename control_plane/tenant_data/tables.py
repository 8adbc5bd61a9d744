"""Deletions with their proofs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from control_plane.platform.tables import metadata, timestamp

deletions = sa.Table(
    "deletions", metadata,
    sa.Column("id", sa.Text, primary_key=True),  # del-...
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False, index=True),
    sa.Column("subject_kind", sa.Text, nullable=False),  # adapter | dataset | tenant
    sa.Column("subject_id", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("proof", JSONB, nullable=False),  # every object with its size and sha256, and that it was searched for afterwards
    sa.Column("sha256", sa.Text, nullable=False),  # of the proof and the previous deletion's: a chain
    sa.Column("previous_sha256", sa.Text),
    sa.Column("seq", sa.BigInteger, sa.Identity(), nullable=False, unique=True),  # order of the chain
    timestamp("requested_at"), timestamp("done_at"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """A finished deletion, a link of the chain."""

    id: str
    tenant_id: str
    subject_kind: str
    subject_id: str
    reason: str
    proof: Mapping[str, Any]
    requested_at: datetime
    done_at: datetime
    previous_sha256: str | None
    sha256: str | None = None
    """Digest of all of the above; None before it is computed."""


deletion_requests = sa.Table(
    "deletion_requests", metadata,
    sa.Column("id", sa.Text, primary_key=True),  # del-...: also the id of its proof
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
    sa.Column("subject_kind", sa.Text, nullable=False),  # adapter | tenant
    sa.Column("subject_id", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("requested_by", sa.Text, nullable=False),  # id of a key, operator, or retention
    sa.Column("closes_account", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("waiting_for", sa.Text),  # why it is not done yet
    sa.Column("removed", JSONB, nullable=False, server_default="[]"),  # directories and records of other systems, with their contents
    timestamp("requested_at"),
    timestamp("absent_at", nullable=True),  # when nothing of it was found; a second search follows
    timestamp("done_at", nullable=True),
    sa.Index("ix_deletion_requests_tenant_id", "tenant_id"),
    sa.Index(
        "uq_deletion_requests_open", "subject_kind", "subject_id", unique=True, postgresql_where=sa.text("done_at IS NULL")
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Deletion:
    """A requested deletion, with its proof where that is read too and it is done."""

    id: str
    tenant_id: str
    subject_kind: str
    subject_id: str
    reason: str
    requested_by: str
    closes_account: bool
    waiting_for: str | None
    requested_at: datetime
    done_at: datetime | None
    proof: Mapping[str, Any] | None = None
    sha256: str | None = None
    previous_sha256: str | None = None

    @property
    def status(self) -> Literal["in_progress", "done"]:
        return "in_progress" if self.done_at is None else "done"


deletion_objects = sa.Table(
    "deletion_objects", metadata,
    sa.Column("deletion_id", sa.Text, sa.ForeignKey("deletion_requests.id"), primary_key=True),
    sa.Column("object_key", sa.Text, primary_key=True),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("sha256", sa.Text, primary_key=True),  # read from the store before deletion; a key can come back with other bytes
    timestamp("deleted_at", nullable=True),
)  # fmt: skip
"""Objects found by a deletion, and which of them are gone; moves into the proof at its end."""
