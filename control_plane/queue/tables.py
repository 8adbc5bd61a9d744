"""Reservations, launches of runs, and the scheduler's counters."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from control_plane.platform.tables import metadata, timestamp

reservations = sa.Table(
    "reservations", metadata,
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id"), primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True),  # the fencing token
    sa.Column("pool", sa.Text, nullable=False),
    sa.Column("num_gpus", sa.Integer, nullable=False),
    sa.Column("placement", JSONB, nullable=False, server_default="[]"),  # [[node, GPUs], ...]
    sa.Column("devices", JSONB, nullable=False, server_default="[]"),  # [[number, ...], ...]: which GPUs, node by node as in placement
    sa.Column("kind", sa.Text, nullable=False, server_default="train"),  # train | evaluate | export
    sa.Column("evaluation_id", sa.Text),  # the ordered evaluation; null: the one that follows the job's training
    sa.Column("export_id", sa.Text),  # the export that is made
    sa.Column("backfill", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("preempted_for", sa.Text),  # the job that it is to make room for
    timestamp("stop_asked_at", nullable=True),  # by the scheduler
    timestamp("granted_at"), timestamp("released_at", nullable=True),
    sa.Index("ix_reservations_active", "pool", postgresql_where=sa.text("released_at IS NULL")),
    sa.Index("uq_reservations_held", "job_id", unique=True, postgresql_where=sa.text("released_at IS NULL")),  # a job holds one at most
    sa.Index("ix_reservations_released_at", "released_at"),
)  # fmt: skip

held_devices = sa.Table(
    "held_devices", metadata,
    sa.Column("node", sa.Text, primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("job_id", sa.Text, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.ForeignKeyConstraint(["job_id", "attempt"], ["reservations.job_id", "reservations.attempt"], ondelete="CASCADE"),
)  # fmt: skip
"""GPUs of unreleased reservations, each once. Written by a trigger of ``reservations``."""

run_launches = sa.Table(
    "run_launches", metadata,
    sa.Column("run_key", sa.Text, primary_key=True),
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id"), nullable=False, index=True),
    sa.Column("run_id", sa.Text),  # Dagster's, once it was made
    sa.Column("claimed_by", sa.Text, nullable=False),
    timestamp("claimed_at"),
)  # fmt: skip
"""Who launches the run of a stage: a sensor tick or the queue listener, never both."""

scheduler_state = sa.Table(
    "scheduler_state", metadata,
    sa.Column("id", sa.Integer, primary_key=True),  # 1: there is one queue
    sa.Column("rounds", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("starts", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("backfills", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("preemptions", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("promises", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("slipped", sa.BigInteger, nullable=False, server_default="0"),  # promises that were not kept, whatever the cause
    sa.Column("round_s", sa.Float), sa.Column("queued", sa.Integer),  # of the last round
    timestamp("last_round_at", nullable=True),
    timestamp("explained_at", nullable=True),  # when the whole queue was last told its positions
)  # fmt: skip
