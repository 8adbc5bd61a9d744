"""Tenants' accounts at other services, and what was sent there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from control_plane.platform.tables import metadata, timestamp

integrations = sa.Table(
    "integrations", metadata,
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), primary_key=True),
    sa.Column("type", sa.Text, primary_key=True),  # wandb
    sa.Column("sealed_key", sa.Text, nullable=False),  # encrypted
    sa.Column("hint", sa.Text, nullable=False),
    timestamp("created_at"), timestamp("updated_at"),
)  # fmt: skip

wandb_runs = sa.Table(
    "wandb_runs", metadata,
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id"), primary_key=True),
    sa.Column("entity", sa.Text),  # its owner there, once it exists
    sa.Column("sent_seq", sa.BigInteger, nullable=False, server_default="0"),  # of the last event sent
    sa.Column("sent_lines", sa.Integer, nullable=False, server_default="0"),
    sa.Column("summary", JSONB, nullable=False, server_default="{}"),  # the last value of each metric sent
    timestamp("failing_since", nullable=True),
    timestamp("next_at", nullable=True),  # of the next attempt; null: nothing is left to send
    sa.Index("ix_wandb_runs_next_at", "next_at"),
)  # fmt: skip
"""One for each job with the integration, made with the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Integration:
    """A row of ``integrations``, without its key."""

    type: str
    hint: str
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class SentRun:
    """A row of ``wandb_runs``."""

    job_id: str
    entity: str | None
    sent_seq: int
    sent_lines: int
    summary: Mapping[str, Any]
    failing_since: datetime | None
    next_at: datetime | None
