"""Policies, progress and review of datasets, and the evaluation suites that they are held against.

Revision ID: 0002
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("files", sa.Column("policies", JSONB(), server_default="{}", nullable=False))
    for name in ("model", "source", "status_code"):
        op.add_column("files", sa.Column(name, sa.Text()))
    op.add_column("files", sa.Column("progress", JSONB()))
    op.add_column("datasets", sa.Column("review", sa.Text(), server_default="none", nullable=False))
    op.add_column("datasets", sa.Column("approved_at", sa.DateTime(timezone=True)))
    op.add_column("datasets", sa.Column("approved_by", sa.Text()))
    op.create_table(
        "eval_suites",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("field", sa.Text(), nullable=False),
        sa.Column("num_items", sa.Integer(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("object_key", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_eval_suites_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_eval_suites")),
        sa.UniqueConstraint("tenant_id", "name", name=op.f("uq_eval_suites_tenant_id_name"), postgresql_nulls_not_distinct=True),
    )


def downgrade() -> None:
    op.drop_table("eval_suites")
    for name in ("approved_by", "approved_at", "review"):
        op.drop_column("datasets", name)
    for name in ("progress", "status_code", "source", "model", "policies"):
        op.drop_column("files", name)
