"""Checkpoints that are not kept any more: marked first, removed from the object store next, their rows stay.

Revision ID: 0006
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("retired_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("checkpoints", sa.Column("removed_at", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    op.execute("DELETE FROM checkpoints WHERE retired_at IS NOT NULL")
    op.drop_column("checkpoints", "removed_at")
    op.drop_column("checkpoints", "retired_at")
