"""Exports of adapters: what was asked for, and what came of it.

Revision ID: 0007
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "exports",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("adapter_id", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("format", sa.Text(), nullable=False),
        sa.Column("precision", sa.Text()),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("error", JSONB()),
        sa.Column("progress", JSONB()),
        sa.Column("claim", sa.Text()),
        sa.Column("object_key", sa.Text()),
        sa.Column("bytes", sa.BigInteger()),
        sa.Column("sha256", sa.Text()),
        sa.Column("manifest", JSONB()),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("beat_at", sa.DateTime(timezone=True)),
        sa.Column("finished_at", sa.DateTime(timezone=True)),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_exports_tenant_id")),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name=op.f("fk_exports_adapter_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_exports")),
        sa.UniqueConstraint("tenant_id", "adapter_id", "key", name=op.f("uq_exports_tenant_id_adapter_id_key")),
    )


def downgrade() -> None:
    op.drop_table("exports")
