"""What all tables share: one metadata with names for every constraint, and columns of time."""

from __future__ import annotations

import sqlalchemy as sa

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)


def timestamp(name: str, *, nullable: bool = False) -> sa.Column[object]:
    """A moment, with its time zone."""
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def owner() -> sa.Column[object]:
    """The tenant that a row belongs to: row security compares it, so that a caller of the API sees no other's rows."""
    return sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False)
