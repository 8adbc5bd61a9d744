"""Adds tasks for the worker process (``python -m control_plane.worker``) in the caller's own transaction."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.engine import Connection

SCHEMA = "tasks"
"""PostgreSQL schema of the queue; ``resources/database/migrations/initial/tasks.sql`` adds the functions used here."""


tasks = sa.table("procrastinate_jobs", sa.column("args", JSONB), schema=SCHEMA)


def has_none(kind: str, id_: sa.ColumnElement[str]) -> sa.ColumnElement[bool]:
    """Whether no task names the row `id_` in its argument `kind`; one that an operator cancelled does."""
    return id_.not_in(sa.select(tasks.c.args[kind].astext).where(tasks.c.args.has_key(kind)))


def defer(
    conn: Connection, task: str, *, queue: str, turn: str | None = None, once: str | None = None, after: timedelta | None = None,
    **args: Any,
) -> None:  # fmt: skip
    """Run `task` with `args` once the caller's transaction commits, or `after` a while; without a commit there is no task.

    Tasks of the same `turn` run one at a time and in order, and different turns alternate. With `once`, a task that waits already is not
    added again, but runs by the earlier of both times.
    """
    at = None if after is None else sa.func.now() + after
    given = (task, queue, sa.cast(args, JSONB), sa.cast(turn, sa.Text), sa.cast(once, sa.Text), sa.cast(at, sa.DateTime(timezone=True)))
    conn.execute(sa.select(sa.func.tasks.defer(*given)))
