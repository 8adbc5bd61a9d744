"""What the scheduler keeps: nodes of a reservation, promises, waits, work lost, and who makes a stage's run.

Revision ID: 0014
"""

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

MOMENT = sa.DateTime(timezone=True)
COUNTED = ("rounds", "starts", "backfills", "preemptions", "promises", "slipped")
JOBS: tuple[sa.Column[Any], ...] = (
    sa.Column("job_class", sa.Text(), nullable=False, server_default="lora"),
    sa.Column("modelled_s", sa.Float()),
    sa.Column("ahead", postgresql.JSONB()),
    sa.Column("promise", postgresql.JSONB()),
    sa.Column("waited_s", sa.Float(), nullable=False, server_default="0"),
    sa.Column("preemptions", sa.Integer(), nullable=False, server_default="0"),
    sa.Column("waiting_since", MOMENT),
    sa.Column("due_at", MOMENT),
    sa.Column("expected_start_at", MOMENT),
    sa.Column("partition_retired_at", MOMENT),
)
RESERVATIONS: tuple[sa.Column[Any], ...] = (
    sa.Column("placement", postgresql.JSONB(), nullable=False, server_default="[]"),
    sa.Column("backfill", sa.Boolean(), nullable=False, server_default=sa.false()),
    sa.Column("preempted_for", sa.Text()),
    sa.Column("stop_asked_at", MOMENT),
)


def upgrade() -> None:
    for column in JOBS:
        op.add_column("jobs", column)
    for column in RESERVATIONS:
        op.add_column("reservations", column)
    op.add_column("attempts", sa.Column("lost_s", sa.Float()))
    op.execute("UPDATE jobs SET waiting_since = queued_at, modelled_s = expected_s WHERE queued_at IS NOT NULL")
    op.execute(
        "UPDATE jobs SET job_class = CASE WHEN spec->>'adapter' = 'full' THEN 'full' ELSE 'lora' END WHERE spec->>'adapter' IS NOT NULL"
    )
    op.create_table(
        "run_launches",
        sa.Column("run_key", sa.Text(), primary_key=True),
        sa.Column("job_id", sa.Text(), sa.ForeignKey("jobs.id"), nullable=False, index=True),
        sa.Column("run_id", sa.Text()),
        sa.Column("claimed_by", sa.Text(), nullable=False),
        sa.Column("claimed_at", MOMENT, nullable=False),
    )
    op.create_table(
        "scheduler_state",
        sa.Column("id", sa.Integer(), primary_key=True),
        *(sa.Column(name, sa.BigInteger(), nullable=False, server_default="0") for name in COUNTED),
        sa.Column("round_s", sa.Float()),
        sa.Column("queued", sa.Integer()),
        sa.Column("last_round_at", MOMENT),
    )
    op.execute("INSERT INTO scheduler_state (id) VALUES (1)")


def downgrade() -> None:
    op.drop_table("scheduler_state")
    op.drop_table("run_launches")
    op.drop_column("attempts", "lost_s")
    for column in RESERVATIONS:
        op.drop_column("reservations", column.name)
    for column in JOBS:
        op.drop_column("jobs", column.name)
