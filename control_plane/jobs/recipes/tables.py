"""Recipes of the platform's operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from control_plane.platform.tables import metadata, timestamp

recipes = sa.Table(
    "recipes", metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("definition", JSONB, nullable=False),  # with all that it inherited when it was added; never changes
    sa.Column("added_by", sa.Text, nullable=False),  # the operator's key, or the machine's user
    timestamp("added_at"),
    timestamp("retired_at", nullable=True),  # no new job uses it
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeVersion:
    """A row of ``recipes``."""

    name: str
    version: int
    definition: Mapping[str, Any]
    added_by: str
    added_at: datetime
    retired_at: datetime | None
