"""Health verdicts of jobs, and an index over the events that are no news of success.

Revision ID: 0005
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "health_verdicts",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("code", sa.Text(), nullable=False),
        sa.Column("audience", sa.Text(), nullable=False),
        sa.Column("level", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", JSONB(), nullable=False),
        sa.Column("raised_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("cleared_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_health_verdicts_job_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_health_verdicts")),
    )
    raised = sa.text("cleared_at IS NULL")
    op.create_index("uq_health_verdicts_raised", "health_verdicts", ["job_id", "code"], unique=True, postgresql_where=raised)
    op.create_index("ix_job_events_alerts", "job_events", ["code"], postgresql_where=sa.text("level <> 'info'"))


def downgrade() -> None:
    op.drop_index("ix_job_events_alerts", table_name="job_events")
    op.drop_table("health_verdicts")
