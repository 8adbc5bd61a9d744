"""Indexes for what is counted and looked up again and again: alerts, verdicts, jobs by state, validations.

Revision ID: 0008
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

ALERTS = sa.text("level <> 'info'")


def upgrade() -> None:
    op.drop_index("ix_job_events_alerts", table_name="job_events")
    op.create_index("ix_job_events_alerts", "job_events", ["code", "level"], postgresql_where=ALERTS)
    op.create_index("ix_job_events_validation", "job_events", ["job_id", "seq"], postgresql_where=sa.text("data ? 'valid_loss'"))
    op.create_index("ix_health_verdicts_counted", "health_verdicts", ["code", "audience"])
    op.create_index("ix_jobs_counted", "jobs", ["state", "tier"])


def downgrade() -> None:
    op.drop_index("ix_jobs_counted", table_name="jobs")
    op.drop_index("ix_health_verdicts_counted", table_name="health_verdicts")
    op.drop_index("ix_job_events_validation", table_name="job_events")
    op.drop_index("ix_job_events_alerts", table_name="job_events")
    op.create_index("ix_job_events_alerts", "job_events", ["code"], postgresql_where=ALERTS)
