"""Outbox, webhook endpoints and deliveries."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from control_plane.platform.tables import metadata, owner, timestamp

outbox = sa.Table(
    "outbox", metadata,
    sa.Column("seq", sa.BigInteger, sa.Identity(), primary_key=True),
    sa.Column("id", sa.Text, nullable=False, unique=True),  # evt_...: the id that every receiver sees
    owner(),
    sa.Column("type", sa.Text, nullable=False),  # fine_tuning.job.succeeded, ...
    sa.Column("subject", sa.Text, nullable=False),  # id of the object: its events are delivered in order
    sa.Column("data", JSONB, nullable=False),
    timestamp("created_at"), timestamp("fanned_out_at", nullable=True),
    sa.Index("ix_outbox_waiting", "seq", postgresql_where=sa.text("fanned_out_at IS NULL")),
    sa.Index("ix_outbox_tenant_seq", "tenant_id", "seq"),
)  # fmt: skip
"""Written in the transaction of the change it reports: neither exists without the other."""

webhook_endpoints = sa.Table(
    "webhook_endpoints", metadata,
    sa.Column("id", sa.Text, primary_key=True),  # we_...
    owner(),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("url", sa.Text, nullable=False),  # scheme, host and port
    sa.Column("sealed_url", sa.Text, nullable=False, server_default=""),  # the whole URL, encrypted
    sa.Column("event_types", JSONB, nullable=False),
    sa.Column("secrets", JSONB, nullable=False),
    sa.Column("state", sa.Text, nullable=False),  # enabled | disabled
    sa.Column("disabled_reason", sa.Text),
    timestamp("failing_since", nullable=True), timestamp("created_at"), timestamp("updated_at"), timestamp("deleted_at", nullable=True),
    sa.Index("ix_webhook_endpoints_tenant_id", "tenant_id"),
)  # fmt: skip

deliveries = sa.Table(
    "deliveries", metadata,
    sa.Column("id", sa.Text, primary_key=True),  # dlv_...
    owner(),
    sa.Column("channel", sa.Text, nullable=False),  # webhook | email
    sa.Column("target", sa.Text, nullable=False),  # id of the endpoint or of the member
    sa.Column("event_seq", sa.BigInteger, sa.ForeignKey("outbox.seq"), nullable=False),
    sa.Column("subject", sa.Text, nullable=False),  # of the event
    sa.Column("state", sa.Text, nullable=False),  # pending | delivered | dead
    sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),  # since it was created or replayed
    sa.Column("last_status", sa.Integer), sa.Column("last_error", sa.Text),
    timestamp("created_at"), timestamp("next_attempt_at"), timestamp("last_attempt_at", nullable=True),
    timestamp("delivered_at", nullable=True),
    sa.UniqueConstraint("event_seq", "target"),
    sa.Index("ix_deliveries_due", "target", "next_attempt_at", postgresql_where=sa.text("state = 'pending'")),
    sa.Index("ix_deliveries_in_order", "target", "subject", "event_seq", postgresql_where=sa.text("state = 'pending'")),
    sa.Index("ix_deliveries_dead", "created_at", postgresql_where=sa.text("state = 'dead'")),
    sa.Index("ix_deliveries_target_created", "target", "created_at", "id"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class SigningSecret:
    secret: str
    """Encrypted in the row."""
    until: float | None = None
    """Unix time until which a replaced one signs beside its successor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """A row of `webhook_endpoints`; see :func:`control_plane.notifications.signatures.opened` for its URL and secrets."""

    id: str
    tenant_id: str
    name: str
    url: str
    sealed_url: str
    event_types: tuple[str, ...]
    secrets: tuple[SigningSecret, ...]
    """Newest first."""
    state: Literal["enabled", "disabled"]
    disabled_reason: str | None
    failing_since: datetime | None
    created_at: datetime
    updated_at: datetime
    deleted_at: datetime | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """A row of `deliveries` with its event's id and type."""

    id: str
    tenant_id: str
    channel: str
    target: str
    subject: str
    state: Literal["pending", "delivered", "dead"]
    attempts: int
    last_status: int | None
    last_error: str | None
    created_at: datetime
    next_attempt_at: datetime
    last_attempt_at: datetime | None
    delivered_at: datetime | None
    event_id: str
    event_type: str
