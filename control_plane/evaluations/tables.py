"""Evaluations and their scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from control_plane.platform.tables import metadata, timestamp

evaluations = sa.Table(
    "evaluations", metadata,
    sa.Column("id", sa.Text, primary_key=True),  # ev-...
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id"), nullable=False),
    sa.Column("adapter_id", sa.Text, sa.ForeignKey("adapters.id"), nullable=False),
    sa.Column("base_model", sa.Text, nullable=False),
    sa.Column("base_digest", sa.Text, nullable=False),  # of the bytes that the adapter is judged on
    sa.Column("kind", sa.Text, nullable=False),  # gate | base_update | monitor | manual
    sa.Column("state", sa.Text, nullable=False),  # queued | running | succeeded | failed
    sa.Column("outcome", sa.Text),  # passed | quarantined, once it has succeeded
    sa.Column("reasons", JSONB),  # reason codes of what blocks
    sa.Column("report_key", sa.Text),
    sa.Column("error", JSONB),
    sa.Column("eval_config", JSONB),  # rules of its own; null: those of the adapter's job
    sa.Column("runs", sa.Integer, nullable=False, server_default="0"),  # workloads and Dagster runs that were started for it
    sa.Column("replaced_runs", sa.Integer, nullable=False, server_default="0"),  # Dagster runs of the present attempt that ended without it
    timestamp("created_at"), timestamp("started_at", nullable=True), timestamp("finished_at", nullable=True),
    sa.Index("ix_evaluations_adapter", "adapter_id", "base_digest"),
    sa.Index("ix_evaluations_open", "created_at", postgresql_where=sa.text("state IN ('queued', 'running')")),
)  # fmt: skip


BASE_UPDATE = "base_update"
"""Kind of evaluation that the platform orders, and pays."""
LOST = "evaluation_lost"
"""Error code of an evaluation that is given up because its Dagster runs die: the platform's fault."""


def is_free(evaluation_id: sa.ColumnElement[str | None]) -> sa.ColumnElement[bool]:
    """Whether a reservation with this `evaluation_id` is of an evaluation that the platform pays, because it ordered it or gave it up."""
    e = evaluations.c
    return sa.exists().where(e.id == evaluation_id, (e.kind == BASE_UPDATE) | (e.error["code"].astext == LOST))


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """An evaluation as it was ordered, and its verdict once it has one."""

    id: str
    tenant_id: str
    job_id: str
    adapter_id: str
    base_model: str
    base_digest: str
    kind: str
    state: str
    outcome: str | None
    reasons: tuple[str, ...] | None
    report_key: str | None
    error: Mapping[str, Any] | None
    """``code``, ``message`` and ``param`` of an :class:`~core.errors.FtError`."""
    eval_config: Mapping[str, Any] | None
    """As requested; see :func:`engine.evals.config.parse`."""
    runs: int
    replaced_runs: int
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None


eval_scores = sa.Table(
    "eval_scores", metadata,
    sa.Column("subject_digest", sa.Text, primary_key=True),  # base model, or base model and adapter manifest; "@" and where
    sa.Column("suite_digest", sa.Text, primary_key=True),  # one suite's items and decoding settings
    sa.Column("suite", sa.Text, nullable=False),  # its id
    sa.Column("scores", JSONB, nullable=False),  # its answers, as the runner leaves them
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), index=True),  # whose items they answer; null: the platform's own
    timestamp("created_at"),
    sa.Index("ix_eval_scores_suite", "subject_digest", "suite", "created_at"),
)  # fmt: skip
