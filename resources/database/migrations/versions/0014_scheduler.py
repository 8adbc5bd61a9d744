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
    sa.Column("barred_until", MOMENT),
    sa.Column("expected_start_at", MOMENT),
    sa.Column("partition_retired_at", MOMENT),
)
RESERVATIONS: tuple[sa.Column[Any], ...] = (
    sa.Column("placement", postgresql.JSONB(), nullable=False, server_default="[]"),
    sa.Column("backfill", sa.Boolean(), nullable=False, server_default=sa.false()),
    sa.Column("preempted_for", sa.Text()),
    sa.Column("stop_asked_at", MOMENT),
)


TOLD = {
    "jobs": "INSERT OR UPDATE OF state, prepare_runs, train_runs, evaluate_runs",
    "reservations": "UPDATE OF released_at",
}
"""After which changes somebody may have something to start: whoever listens is told when they are committed, once a transaction."""


def _tell_of_changes() -> None:
    op.execute(
        "CREATE FUNCTION ft_queue_changed() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_notify('ft_queue', ''); RETURN NULL; END $$"
    )
    for table, changes in TOLD.items():
        op.execute(f"CREATE TRIGGER {table}_told AFTER {changes} ON {table} FOR EACH STATEMENT EXECUTE FUNCTION ft_queue_changed()")


def upgrade() -> None:
    for column in JOBS:
        op.add_column("jobs", column)
    for column in RESERVATIONS:
        op.add_column("reservations", column)
    op.create_index("uq_reservations_held", "reservations", ["job_id"], unique=True, postgresql_where=sa.text("released_at IS NULL"))
    op.create_index("ix_reservations_released_at", "reservations", ["released_at"])
    op.add_column("attempts", sa.Column("lost_s", sa.Float()))
    op.create_index("ix_attempts_lost", "attempts", ["lost_s"], postgresql_where=sa.text("lost_s > 0"))
    op.create_index("ix_jobs_first_start", "jobs", ["tier", sa.text("(started_at - GREATEST(created_at, capped_at))")])
    op.execute("UPDATE jobs SET waiting_since = queued_at, modelled_s = expected_s WHERE queued_at IS NOT NULL")
    # one that came back keeps queued_at, so the time that it ran lies after it; since when it waits again nobody has written
    op.execute("UPDATE jobs SET waiting_since = now() WHERE state = 'queued' AND attempt > 0")
    op.execute("UPDATE jobs SET barred_until = capped_at WHERE state = 'queued'")
    # how many parameters a base model has is in its catalogue, not here: adapters on those of the 70B class that are in the queue by now
    # stay "lora" to their ends, and may be given any pool that takes those; until this revision pools took every class
    op.execute(
        "UPDATE jobs SET job_class = CASE WHEN spec->>'adapter' = 'full' THEN 'full' ELSE 'lora' END WHERE spec->>'adapter' IS NOT NULL"
    )
    # a round tells thousands of jobs where they stand: with room in a row's own page none of the table's indexes is written for that
    # (10,000 rows: 23,000 records of WAL for 92,000)
    op.execute("ALTER TABLE jobs SET (fillfactor = 60)")
    learned = sa.text("state = 'succeeded' AND modelled_s > 0")
    op.create_index("ix_jobs_learned", "jobs", ["finished_at"], postgresql_where=learned)
    op.create_index("ix_jobs_learned_of_model", "jobs", ["model", "finished_at"], postgresql_where=learned)
    partitioned = sa.text("finished_at IS NOT NULL AND partition_retired_at IS NULL")
    op.create_index("ix_jobs_partitioned", "jobs", ["finished_at"], postgresql_where=partitioned)
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
        sa.Column("explained_at", MOMENT),
    )
    op.execute("INSERT INTO scheduler_state (id) VALUES (1)")
    op.create_table(
        "node_drains",
        sa.Column("node", sa.Text(), primary_key=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("drained_by", sa.Text(), nullable=False),
        sa.Column("drained_at", MOMENT, nullable=False),
    )
    op.execute(
        "CREATE TRIGGER node_drains_audited AFTER INSERT OR UPDATE OR DELETE ON node_drains FOR EACH ROW "
        "EXECUTE FUNCTION ft_audit('node_drain', 'node', 'reason')"
    )
    _tell_of_changes()


def downgrade() -> None:
    for table in TOLD:
        op.execute(f"DROP TRIGGER {table}_told ON {table}")
    op.execute("DROP FUNCTION ft_queue_changed()")
    op.drop_table("node_drains")
    op.drop_table("scheduler_state")
    op.execute("ALTER TABLE jobs RESET (fillfactor)")
    op.drop_index("ix_jobs_learned_of_model", "jobs")
    op.drop_index("ix_jobs_learned", "jobs")
    op.drop_table("run_launches")
    op.drop_index("ix_jobs_partitioned", "jobs")
    op.drop_index("ix_jobs_first_start", "jobs")
    op.drop_column("attempts", "lost_s")
    op.drop_index("ix_reservations_released_at", "reservations")
    op.drop_index("uq_reservations_held", "reservations")
    for column in RESERVATIONS:
        op.drop_column("reservations", column.name)
    for column in JOBS:
        op.drop_column("jobs", column.name)
