"""The ledger, and what bills are made of. Money is integer micro-dollars."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from control_plane.platform.tables import metadata, owner, timestamp

ledger_entries = sa.Table(
    "ledger_entries", metadata,
    sa.Column("id", sa.Text, primary_key=True),  # <job>/a<attempt>/<kind>: one entry, however often it is reported
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
    sa.Column("kind", sa.Text, nullable=False),  # usage | refund | storage | adjustment
    sa.Column("job_id", sa.Text), sa.Column("attempt", sa.Integer),  # null if it belongs to no job
    sa.Column("gpu_type", sa.Text), sa.Column("pricing", sa.Text),  # on_demand | spot | reserved
    sa.Column("gpu_seconds", sa.Float, nullable=False, server_default="0"),
    sa.Column("amount_micros", sa.BigInteger, nullable=False),  # positive: the tenant owes it
    sa.Column("list_micros", sa.BigInteger, nullable=False),  # the same on demand; the difference is what spot saved
    sa.Column("detail", JSONB, nullable=False),
    timestamp("occurred_at"),  # end of what is billed; determines the month of the bill
    timestamp("created_at"),
    sa.Index("ix_ledger_entries_tenant_occurred", "tenant_id", "occurred_at"),
    sa.Index("ix_ledger_entries_tenant_created", "tenant_id", "created_at"),  # entries made after an invoice
    sa.Index("ix_ledger_entries_job_id", "job_id"),
)  # fmt: skip
"""Append-only: a trigger refuses every change."""

ledger_postings = sa.Table(
    "ledger_postings", metadata,
    sa.Column("entry_id", sa.Text, sa.ForeignKey("ledger_entries.id"), primary_key=True),
    sa.Column("account", sa.Text, primary_key=True),  # receivable/<tenant>, revenue/gpu, revenue/storage, refunds
    owner(),
    sa.Column("amount_micros", sa.BigInteger, nullable=False),  # debit positive, credit negative
    sa.Index("ix_ledger_postings_account", "account"),
)  # fmt: skip
"""Both sides of every entry; a constraint trigger checks at commit that they add up to zero. Append-only, too."""

meter_events = sa.Table(
    "meter_events", metadata,
    sa.Column("id", sa.Text, primary_key=True),  # given by the reporter: a repeated report has the same id
    owner(),
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id"), nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),  # started | ended
    sa.Column("data", JSONB, nullable=False),  # start: gpu_type, num_gpus, tier, pricing; end: outcome, fault
    timestamp("at"), timestamp("received_at"),
    sa.Index("ix_meter_events_attempt", "job_id", "attempt"),
    sa.Index("ix_meter_events_tenant_at", "tenant_id", "at"),
)  # fmt: skip
"""Reports of when workloads ran; bills are computed from them in any order."""

unbilled_attempts = sa.Table(
    "unbilled_attempts", metadata,
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id"), primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True),
    owner(),
)  # fmt: skip
"""Attempts with meter events that are not billed: running ones, and those that wait for a report or a price."""

refund_cases = sa.Table(
    "refund_cases", metadata,
    sa.Column("id", sa.Text, primary_key=True),  # <job>-a<attempt>: used in URL paths
    owner(),
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id"), nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("amount_micros", sa.BigInteger, nullable=False),
    sa.Column("outcome", sa.Text, nullable=False),  # failure class whose fault is unclear
    sa.Column("state", sa.Text, nullable=False),  # pending | granted | refused
    sa.Column("decided_by", sa.Text), sa.Column("note", sa.Text),
    timestamp("created_at"), timestamp("decided_at", nullable=True),
    sa.Index("ix_refund_cases_pending", "created_at", postgresql_where=sa.text("state = 'pending'")),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class RefundCase:
    id: str
    tenant_id: str
    job_id: str
    attempt: int
    amount_micros: int
    outcome: str
    state: Literal["pending", "granted", "refused"]
    decided_by: str | None
    note: str | None
    created_at: datetime
    decided_at: datetime | None


storage_samples = sa.Table(
    "storage_samples", metadata,
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), primary_key=True),
    sa.Column("day", sa.Date, primary_key=True),
    sa.Column("bytes", JSONB, nullable=False),  # by class: files, datasets, checkpoints, adapters, exports
    timestamp("created_at"),
)  # fmt: skip

invoices = sa.Table(
    "invoices", metadata,
    sa.Column("id", sa.Text, primary_key=True),  # inv_<tenant>_<yyyy-mm>
    owner(),
    sa.Column("month", sa.Text, nullable=False),  # yyyy-mm, UTC
    sa.Column("total_micros", sa.BigInteger, nullable=False),
    sa.Column("document", JSONB, nullable=False),
    sa.Column("sha256", sa.Text, nullable=False),  # of the document
    timestamp("issued_at"),
    sa.UniqueConstraint("tenant_id", "month"),
)  # fmt: skip
"""Issued once, when the month is over and settled; append-only. Later entries are on a later invoice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IssuedInvoice:
    id: str
    month: str
    total_micros: int
    sha256: str
    issued_at: datetime
    status: Literal["issued"] = "issued"


invoice_entries = sa.Table(
    "invoice_entries", metadata,
    sa.Column("entry_id", sa.Text, sa.ForeignKey("ledger_entries.id"), primary_key=True),
    sa.Column("invoice_id", sa.Text, sa.ForeignKey("invoices.id"), nullable=False, index=True),
    owner(),
)  # fmt: skip
"""The invoice of each entry, at most one (primary key). Append-only."""

budgets = sa.Table(
    "budgets", metadata,
    sa.Column("id", sa.Text, primary_key=True),  # bud_...
    owner(),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("limit_micros", sa.BigInteger, nullable=False),  # per month
    sa.Column("thresholds", JSONB, nullable=False),  # percents, ascending
    timestamp("created_at"), timestamp("updated_at"),
    sa.UniqueConstraint("tenant_id", "name"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """A budget and its state this month."""

    id: str
    name: str
    limit_micros: int
    thresholds: tuple[int, ...]
    created_at: datetime
    updated_at: datetime
    spent_micros: int
    """Entries of the month, plus running attempts."""
    alerted: tuple[int, ...]
    """Thresholds already reported this month."""


budget_alerts = sa.Table(
    "budget_alerts", metadata,
    sa.Column("budget_id", sa.Text, sa.ForeignKey("budgets.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("month", sa.Text, primary_key=True),
    sa.Column("threshold", sa.Integer, primary_key=True),
    owner(),
    sa.Column("spent_micros", sa.BigInteger, nullable=False),
    timestamp("created_at"),
)  # fmt: skip
