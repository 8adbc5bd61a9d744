"""Attempts of jobs, their checkpoints and health verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from control_plane.platform.tables import metadata, owner, timestamp

health_verdicts = sa.Table(
    "health_verdicts", metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id"), nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("code", sa.Text, nullable=False),
    sa.Column("audience", sa.Text, nullable=False),  # tenant | operator
    sa.Column("level", sa.Text, nullable=False),
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("data", JSONB, nullable=False),  # value, limit, next_step
    timestamp("raised_at"), timestamp("cleared_at", nullable=True),
    sa.Index("uq_health_verdicts_raised", "job_id", "code", unique=True, postgresql_where=sa.text("cleared_at IS NULL")),
    sa.Index("ix_health_verdicts_counted", "code", "audience"),
)  # fmt: skip

attempts = sa.Table(
    "attempts", metadata,
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id"), primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True),
    sa.Column("workload", sa.Text, nullable=False),
    sa.Column("outcome", sa.Text),  # failure class, or succeeded; null while it runs
    sa.Column("exit_code", sa.Integer),
    sa.Column("from_step", sa.Integer), sa.Column("last_step", sa.Integer),
    sa.Column("lost_s", sa.Float),  # GPU-seconds of work after its last checkpoint, which the next attempt repeats
    timestamp("started_at", nullable=True), timestamp("ended_at", nullable=True),
    sa.Column("nodes", JSONB(none_as_null=True)),  # machines that run it, if the launcher chose them; null: as reserved
    timestamp("completed_at", nullable=True),  # when its log and its tracked run were complete, after its end
    sa.Index("ix_attempts_lost", "lost_s", postgresql_where=sa.text("lost_s > 0")),
    sa.Index("ix_attempts_incomplete", "job_id", postgresql_where=sa.text("completed_at IS NULL")),
)  # fmt: skip

agents = sa.Table(
    "agents", metadata,
    sa.Column("job_id", sa.Text, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True),
    sa.Column("node", sa.Integer, primary_key=True),  # number in the gang
    sa.Column("may_read", JSONB, nullable=False),  # object prefixes of its inputs
    sa.Column("reported_step", sa.Integer, nullable=False), sa.Column("reported_validation", sa.Integer, nullable=False),
    sa.Column("beat", sa.Integer, nullable=False),  # number of the last heartbeat
    sa.Column("notices", sa.Integer, nullable=False),  # how many were recorded
    timestamp("heartbeat_at", nullable=True),
    sa.Column("facts", JSONB),  # agent.messages.Facts of the last heartbeat
    sa.Column("exit", JSONB),  # agent.messages.Exit; null until it has ended
    sa.Column("address", sa.Text),  # where it could lead the gang; null until it can start
    sa.ForeignKeyConstraint(["job_id", "attempt"], ["attempts.job_id", "attempts.attempt"]),
)  # fmt: skip
"""The agent on one node of an attempt: what it may do, and what it last said. No tenant's call sees it. Retention deletes it a week after
its job has ended."""

agent_tokens = sa.Table(
    "agent_tokens", metadata,
    sa.Column("sha256", sa.Text, primary_key=True),
    sa.Column("job_id", sa.Text, nullable=False, index=True),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.ForeignKeyConstraint(["job_id", "attempt"], ["attempts.job_id", "attempts.attempt"]),
)  # fmt: skip
"""Digests of the tokens with which the agents of an attempt authenticate, one for each time that it was described to the launcher.
Deleted with `agents`."""

checkpoints = sa.Table(
    "checkpoints", metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id"), nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("step", sa.Integer, nullable=False),
    sa.Column("object_prefix", sa.Text, nullable=False),
    sa.Column("manifest_sha256", sa.Text, nullable=False),
    sa.Column("metrics", JSONB, nullable=False),
    sa.Column("final", sa.Boolean, nullable=False, server_default=sa.false()),
    timestamp("created_at"),
    timestamp("retired_at", nullable=True),  # when retention dropped it; no longer read
    timestamp("removed_at", nullable=True),  # when its objects were deleted
    sa.UniqueConstraint("job_id", "step"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A row of ``checkpoints``."""

    id: str
    job_id: str
    attempt: int
    step: int
    object_prefix: str
    manifest_sha256: str
    metrics: Mapping[str, Any]
    final: bool
    created_at: datetime

    @property
    def name(self) -> str:
        """OpenAI's name of it."""
        return f"{self.job_id}:step-{self.step}"


checkpoint_permissions = sa.Table(
    "checkpoint_permissions", metadata,
    sa.Column("id", sa.Text, primary_key=True),  # cp_...
    owner(),
    sa.Column("checkpoint_id", sa.Text, sa.ForeignKey("checkpoints.id"), nullable=False),
    sa.Column("project_id", sa.Text, nullable=False),
    timestamp("created_at"),
    sa.UniqueConstraint("checkpoint_id", "project_id"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPermission:
    """A row of ``checkpoint_permissions``."""

    id: str
    project_id: str
    created_at: datetime
