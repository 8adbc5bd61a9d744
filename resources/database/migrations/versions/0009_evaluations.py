"""Evaluations of an adapter on any base, weighted routes, what each replica serves, approvals, and proofs of deletion.

Revision ID: 0009
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def _time(name: str, *, nullable: bool = False) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def upgrade() -> None:
    op.execute("DELETE FROM eval_scores")  # a cache, and its entries are of single suites from now on
    op.add_column("eval_scores", sa.Column("suite", sa.Text, nullable=False))
    op.create_index("ix_eval_scores_suite", "eval_scores", ["subject_digest", "suite", "created_at"])
    op.add_column("jobs", sa.Column("evaluation", JSONB))
    op.add_column("datasets", _time("cooled_at", nullable=True))
    op.add_column("adapters", sa.Column("approval", sa.Text, nullable=False, server_default="none"))
    op.add_column("adapters", sa.Column("approved_by", sa.Text))
    for name in ("approved_at", "deprecated_at", "archived_at"):
        op.add_column("adapters", _time(name, nullable=True))
    op.add_column("deployments", _time("desired_at", nullable=True))
    op.create_table(
        "replica_adapters",
        sa.Column("replica", sa.Text),
        sa.Column("adapter_id", sa.Text, sa.ForeignKey("adapters.id", name=op.f("fk_replica_adapters_adapter_id"))),
        sa.Column("observed", sa.Text, nullable=False),
        sa.Column("detail", sa.Text),
        sa.Column("failures", sa.Integer, nullable=False, server_default="0"),
        _time("updated_at"),
        sa.PrimaryKeyConstraint("replica", "adapter_id", name=op.f("pk_replica_adapters")),
    )
    op.create_table(
        "model_routes",
        sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id", name=op.f("fk_model_routes_tenant_id"))),
        sa.Column("name", sa.Text),
        sa.Column("targets", JSONB, nullable=False),
        _time("created_at"),
        _time("updated_at"),
        sa.PrimaryKeyConstraint("tenant_id", "name", name=op.f("pk_model_routes")),
    )
    _evaluations()
    op.create_table(
        "deletions",
        sa.Column("id", sa.Text),
        sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id", name=op.f("fk_deletions_tenant_id")), nullable=False),
        sa.Column("subject_kind", sa.Text, nullable=False),
        sa.Column("subject_id", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("proof", JSONB, nullable=False),
        sa.Column("sha256", sa.Text, nullable=False),
        sa.Column("previous_sha256", sa.Text),
        _time("requested_at"),
        _time("done_at"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_deletions")),
    )
    op.create_index("ix_deletions_tenant_id", "deletions", ["tenant_id"])


def _evaluations() -> None:
    op.create_table(
        "evaluations",
        sa.Column("id", sa.Text),
        sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id", name=op.f("fk_evaluations_tenant_id")), nullable=False),
        sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id", name=op.f("fk_evaluations_job_id")), nullable=False),
        sa.Column("adapter_id", sa.Text, sa.ForeignKey("adapters.id", name=op.f("fk_evaluations_adapter_id")), nullable=False),
        sa.Column("base_model", sa.Text, nullable=False),
        sa.Column("base_digest", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("outcome", sa.Text),
        sa.Column("reasons", JSONB),
        sa.Column("report_key", sa.Text),
        sa.Column("error", JSONB),
        sa.Column("eval_config", JSONB),
        sa.Column("runs", sa.Integer, nullable=False, server_default="0"),
        _time("created_at"),
        _time("started_at", nullable=True),
        _time("beat_at", nullable=True),
        _time("finished_at", nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_evaluations")),
    )
    op.create_index("ix_evaluations_adapter", "evaluations", ["adapter_id", "base_digest"])
    op.create_index("ix_evaluations_open", "evaluations", ["created_at"], postgresql_where=sa.text("state IN ('queued', 'running')"))


def downgrade() -> None:
    op.drop_index("ix_eval_scores_suite", "eval_scores")
    op.drop_column("eval_scores", "suite")
    for table in ("deletions", "evaluations", "model_routes", "replica_adapters"):
        op.drop_table(table)
    op.drop_column("deployments", "desired_at")
    for name in ("archived_at", "deprecated_at", "approved_at", "approved_by", "approval"):
        op.drop_column("adapters", name)
    op.drop_column("datasets", "cooled_at")
    op.drop_column("jobs", "evaluation")
