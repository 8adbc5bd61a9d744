"""Sweeps and their trials; where a job's weights start from, and whose adapter answers for it.

Revision ID: 0004
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("warm_start", JSONB()))
    op.add_column("jobs", sa.Column("reused_job_id", sa.Text()))
    op.add_column("adapters", sa.Column("parent_adapter_id", sa.Text()))
    op.add_column("adapters", sa.Column("parent_checkpoint_id", sa.Text()))
    op.create_table(
        "sweeps",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("request", JSONB(), nullable=False),
        sa.Column("settings", JSONB(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("cancelled_at", sa.DateTime(timezone=True)),
        sa.Column("submitted_at", sa.DateTime(timezone=True)),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_sweeps_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sweeps")),
    )
    op.create_index("ix_sweeps_tenant_created", "sweeps", ["tenant_id", "created_at", "id"])
    op.create_index("ix_sweeps_open", "sweeps", ["created_at"], postgresql_where=sa.text("submitted_at IS NULL"))
    op.create_table(
        "sweep_trials",
        sa.Column("sweep_id", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("parameters", JSONB(), nullable=False),
        sa.Column("job_id", sa.Text()),
        sa.Column("reused", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("error", JSONB()),
        sa.ForeignKeyConstraint(["sweep_id"], ["sweeps.id"], name=op.f("fk_sweep_trials_sweep_id")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_sweep_trials_job_id")),
        sa.PrimaryKeyConstraint("sweep_id", "number", name=op.f("pk_sweep_trials")),
    )
    op.create_index(op.f("ix_sweep_trials_job_id"), "sweep_trials", ["job_id"])


def downgrade() -> None:
    op.drop_table("sweep_trials")
    op.drop_table("sweeps")
    for name in ("parent_checkpoint_id", "parent_adapter_id"):
        op.drop_column("adapters", name)
    for name in ("reused_job_id", "warm_start"):
        op.drop_column("jobs", name)
