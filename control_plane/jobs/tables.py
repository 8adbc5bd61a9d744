"""Jobs, their events and sweeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from control_plane.jobs.job_documents import EvaluationProgress, WarmStartSource
from control_plane.platform.job_states import JobState
from control_plane.platform.tables import metadata, timestamp
from engine.data import MixedFile

jobs = sa.Table(
    "jobs", metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
    sa.Column("state", sa.Text, nullable=False, index=True),
    sa.Column("tier", sa.Text, nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("base_digest", sa.Text, nullable=False),
    sa.Column("method", sa.Text, nullable=False),
    sa.Column("recipe", sa.Text),  # chosen at submission, as name@version
    sa.Column("training_file", sa.Text, sa.ForeignKey("files.id"), nullable=False),
    sa.Column("validation_file", sa.Text, sa.ForeignKey("files.id")),
    sa.Column("suffix", sa.Text),
    sa.Column("seed", sa.BigInteger, nullable=False),
    sa.Column("request", JSONB, nullable=False),  # the body as accepted
    sa.Column("request_sha256", sa.Text, nullable=False),
    sa.Column("hyperparameters", JSONB, nullable=False),  # as requested; "auto" is resolved once prepared
    sa.Column("metadata", JSONB),
    sa.Column("dataset_id", sa.Text),
    sa.Column("pack_fingerprint", sa.Text),
    sa.Column("spec", JSONB),  # frozen training spec
    sa.Column("spec_sha256", sa.Text),
    sa.Column("num_gpus", sa.Integer, nullable=False, server_default="1"),
    sa.Column("job_class", sa.Text, nullable=False, server_default="lora"),  # lora | large | full: which pools take it
    sa.Column("modelled_s", sa.Float),  # training time by the cost model
    sa.Column("setup_s", sa.Float),  # of that, until the first step
    sa.Column("expected_s", sa.Float),  # the same, corrected by similar jobs
    sa.Column("attempt", sa.Integer, nullable=False, server_default="0"),
    sa.Column("prepare_runs", sa.Integer, nullable=False, server_default="0"),
    sa.Column("train_runs", sa.Integer, nullable=False, server_default="0"),  # Dagster runs of the present attempt
    sa.Column("evaluate_runs", sa.Integer, nullable=False, server_default="0"),
    sa.Column("evaluation_s", sa.Float),  # that an evaluation of it is expected to hold its GPUs
    sa.Column("evaluation_gpus", sa.Integer, nullable=False, server_default="1"),  # of one node, which hold the whole base
    sa.Column("reason", sa.Text),  # why it waits: a reason code
    sa.Column("reason_detail", sa.Text),
    sa.Column("queue_position", sa.Integer),
    sa.Column("ahead", JSONB),  # jobs ahead in the queue, as counts: {"jobs": {tier: n}, "num_gpus": n}
    sa.Column("promise", JSONB),  # its reservation: {"start", "pool", "placement", "made_at"}
    sa.Column("waited_s", sa.Float, nullable=False, server_default="0"),  # seconds in the queue in earlier stays
    sa.Column("preemptions", sa.Integer, nullable=False, server_default="0"),
    timestamp("waiting_since", nullable=True),  # start of its present or last stay in the queue
    timestamp("due_at", nullable=True),  # when it can no longer be overtaken
    timestamp("expected_start_at", nullable=True),
    timestamp("partition_retired_at", nullable=True),  # when its key was removed from Dagster; events and runs stay
    timestamp("barred_until", nullable=True),  # when a cap or suspension last barred it; does not count as waiting
    timestamp("capped_at", nullable=True),  # until when its tenant's hard cap delayed its first start
    sa.Column("step", sa.Integer), sa.Column("total_steps", sa.Integer), sa.Column("loss", sa.Float),
    sa.Column("tokens_per_s", sa.Float),
    sa.Column("trained_tokens", sa.BigInteger),
    sa.Column("evaluation", JSONB),
    sa.Column("checkpointing", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("stop_requested", sa.Text),  # cancel | pause | preempt
    sa.Column("adapter_id", sa.Text),
    sa.Column("fine_tuned_model", sa.Text),
    sa.Column("warm_start", JSONB),
    sa.Column("reused_job_id", sa.Text),  # the job whose adapter was reused; this one trained nothing
    sa.Column("error", JSONB),
    sa.Column("api_key_id", sa.Text),  # the key that submitted it; null: a session of the console, or a process of the platform
    sa.Column("trace_parent", sa.Text),  # W3C traceparent of the submitting request
    timestamp("created_at"), timestamp("queued_at", nullable=True), timestamp("started_at", nullable=True),
    timestamp("first_step_at", nullable=True),
    timestamp("heartbeat_at", nullable=True), timestamp("finished_at", nullable=True),
    timestamp("estimated_finish_at", nullable=True),  # of its training; once it evaluates, of its evaluation
    sa.Index("ix_jobs_tenant_created", "tenant_id", "created_at", "id"),
    sa.Index("ix_jobs_dataset", "tenant_id", "dataset_id", "created_at", "id"),
    sa.Index("ix_jobs_mixed", "tenant_id", postgresql_where=sa.text("request ? 'training_files'")),
    sa.Index("ix_jobs_counted", "state", "tier"),
    sa.Index("ix_jobs_learned", "finished_at", postgresql_where=sa.text("state = 'succeeded' AND modelled_s > 0")),
    sa.Index("ix_jobs_learned_of_model", "model", "finished_at", postgresql_where=sa.text("state = 'succeeded' AND modelled_s > 0")),
    sa.Index("ix_jobs_partitioned", "finished_at", postgresql_where=sa.text("finished_at IS NOT NULL AND partition_retired_at IS NULL")),
    sa.Index("ix_jobs_first_start", "tier", sa.text("(started_at - GREATEST(created_at, capped_at))")),
    sa.Index("ix_jobs_open", "tenant_id", postgresql_where=sa.text("state NOT IN ('succeeded', 'failed', 'cancelled')")),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A row of ``jobs``, without the columns that only queries read."""

    id: str
    tenant_id: str
    state: JobState
    tier: str
    model: str
    base_digest: str
    method: str
    recipe: str | None
    training_file: str
    """Of a mixture, its first file."""
    validation_file: str | None
    suffix: str | None
    seed: int
    request: Mapping[str, Any]
    hyperparameters: Mapping[str, Any]
    metadata: Mapping[str, str] | None
    dataset_id: str | None
    pack_fingerprint: str | None
    spec: Mapping[str, Any] | None
    spec_sha256: str | None
    num_gpus: int
    attempt: int
    reason: str | None
    reason_detail: str | None
    queue_position: int | None
    ahead: Mapping[str, Any] | None
    promise: Mapping[str, Any] | None
    waited_s: float
    preemptions: int
    waiting_since: datetime | None
    due_at: datetime | None
    expected_start_at: datetime | None
    barred_until: datetime | None
    capped_at: datetime | None
    step: int | None
    total_steps: int | None
    loss: float | None
    tokens_per_s: float | None
    trained_tokens: int | None
    evaluation: EvaluationProgress | None
    checkpointing: bool
    stop_requested: str | None
    adapter_id: str | None
    fine_tuned_model: str | None
    warm_start: WarmStartSource | None
    reused_job_id: str | None
    error: Mapping[str, Any] | None
    api_key_id: str | None
    """The key that submitted it, itself or its sweep; None: a session of the console, or a process of the platform."""
    trace_parent: str | None
    created_at: datetime
    queued_at: datetime | None
    started_at: datetime | None
    first_step_at: datetime | None
    heartbeat_at: datetime | None
    estimated_finish_at: datetime | None
    """Of its training; once it evaluates, of its evaluation."""
    evaluation_s: float | None
    finished_at: datetime | None

    @property
    def estimated_finish(self) -> datetime | None:
        """When it is expected to have a result: the evaluation follows the training."""
        evaluation_s = 0.0 if self.state is JobState.EVALUATING else self.evaluation_s or 0.0
        return None if self.estimated_finish_at is None else self.estimated_finish_at + timedelta(seconds=evaluation_s)

    @property
    def training_files(self) -> tuple[MixedFile, ...]:
        """Files of a mixture; empty for a single training file."""
        return tuple(MixedFile.from_dict(one) for one in self.request.get("training_files") or ())

    @property
    def trained_on(self) -> tuple[str, ...]:
        """Ids of its training files."""
        return tuple(one.file for one in self.training_files) or (self.training_file,)

    @property
    def dataset(self) -> str:
        """Id of its dataset version, which is pinned before it is packed."""
        assert self.dataset_id is not None, self.id
        return self.dataset_id

    @property
    def pack(self) -> str:
        """Fingerprint of its pack, which is known once it leaves ``validating``."""
        assert self.pack_fingerprint is not None, self.id
        return self.pack_fingerprint

    @property
    def validation_packs(self) -> tuple[tuple[str, str], ...]:
        """Fingerprints of the packs that hold its held-out rows, each with its directory among them (``TrainingSpec.packs``): of a mixture
        all, or with a validation file the first, which holds it."""
        sources = [] if self.validation_file else (self.spec or {}).get("sources") or []
        return tuple((source["pack_fingerprint"], source["pack_fingerprint"]) for source in sources) or ((self.pack, ""),)

    @property
    def measured_by(self) -> str:
        """Id of the job whose training produced its metrics: an earlier one if its adapter was reused."""
        return self.reused_job_id or self.id


_IS_MIXTURE = jobs.c.request.has_key("training_files")
"""The condition of ``ix_jobs_mixed``: without it, the specifications of all other jobs would be read."""


def names_file(file_id: str | sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """Selects jobs that name the file, for training or validation."""
    mixed = jobs.c.request["training_files"].contains(
        sa.func.jsonb_build_array(sa.func.jsonb_build_object("file", sa.cast(file_id, sa.Text)))
    )
    return sa.or_(jobs.c.training_file == file_id, jobs.c.validation_file == file_id, sa.and_(_IS_MIXTURE, mixed))


def trained_on_dataset(dataset_id: str | sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """Selects jobs that train on the dataset version, alone or in a mixture."""
    mixed = jobs.c.spec["sources"].contains(
        sa.func.jsonb_build_array(sa.func.jsonb_build_object("dataset_id", sa.cast(dataset_id, sa.Text)))
    )
    return sa.or_(jobs.c.dataset_id == dataset_id, sa.and_(_IS_MIXTURE, sa.func.coalesce(mixed, sa.false())))


job_events = sa.Table(
    "job_events", metadata,
    sa.Column("seq", sa.BigInteger, sa.Identity(), primary_key=True),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id"), nullable=False),
    sa.Column("level", sa.Text, nullable=False),
    sa.Column("type", sa.Text, nullable=False),  # message | metrics
    sa.Column("code", sa.Text),
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("data", JSONB),
    timestamp("created_at"),
    sa.Index("ix_job_events_job_seq", "job_id", "seq"),
    sa.Index("ix_job_events_alerts", "code", "level", postgresql_where=sa.text("level <> 'info'")),
    sa.Index("ix_job_events_messages", "job_id", "seq", postgresql_where=sa.text("type = 'message'")),
    sa.Index("ix_job_events_validation", "job_id", "seq", postgresql_where=sa.text("data ? 'valid_loss'")),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEvent:
    """A row of ``job_events``."""

    seq: int
    id: str
    level: str
    type: str
    code: str | None
    message: str
    data: Mapping[str, Any] | None
    created_at: datetime


HAS_VALIDATION = sa.text("job_events.data ? 'valid_loss'")
"""Events that report a validation, worded as in the index over them."""

sweeps = sa.Table(
    "sweeps", metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
    sa.Column("request", JSONB, nullable=False),  # the body shared by all trials, without "sweep"
    sa.Column("settings", JSONB, nullable=False),  # "sweep" of the body, with its seed
    timestamp("created_at"), timestamp("cancelled_at", nullable=True),
    sa.Column("api_key_id", sa.Text),  # the key that submitted it, as of a job
    timestamp("submitted_at", nullable=True),  # when every trial had its job, or the reason why it has none
    sa.Column("waits", JSONB),  # why its next trial was refused for now: reason, at, left_s (GPU-seconds, if they are the reason)
    sa.Index("ix_sweeps_tenant_created", "tenant_id", "created_at", "id"),
    sa.Index("ix_sweeps_open", "created_at", postgresql_where=sa.text("submitted_at IS NULL")),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """A row of ``sweeps``."""

    id: str
    tenant_id: str
    request: Mapping[str, Any]
    settings: Mapping[str, Any]
    created_at: datetime
    cancelled_at: datetime | None
    submitted_at: datetime | None
    api_key_id: str | None
    waits: Mapping[str, Any] | None


sweep_trials = sa.Table(
    "sweep_trials", metadata,
    sa.Column("sweep_id", sa.Text, sa.ForeignKey("sweeps.id"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("parameters", JSONB, nullable=False),
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id"), index=True),  # null until there is room for it
    sa.Column("reused", sa.Boolean, nullable=False, server_default=sa.false()),  # the job existed before, and had succeeded
    sa.Column("error", JSONB),  # why it could not be submitted
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepTrial:
    """A row of ``sweep_trials``."""

    sweep_id: str
    number: int
    parameters: Mapping[str, Any]
    job_id: str | None
    reused: bool
    error: Mapping[str, Any] | None
