"""Jobs, their events and sweeps."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from control_plane.platform.tables import metadata, timestamp

jobs = sa.Table(
    "jobs", metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
    sa.Column("state", sa.Text, nullable=False, index=True),
    sa.Column("tier", sa.Text, nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("base_digest", sa.Text, nullable=False),
    sa.Column("method", sa.Text, nullable=False),
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
    sa.Column("evaluation", JSONB),  # progress while it is evaluated: subject, suite, done, total
    sa.Column("checkpointing", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("stop_requested", sa.Text),  # cancel | pause | preempt
    sa.Column("adapter_id", sa.Text),
    sa.Column("fine_tuned_model", sa.Text),
    sa.Column("warm_start", JSONB),  # adapter or checkpoint that training starts from: adapter, manifest_sha256, rank, ...
    sa.Column("reused_job_id", sa.Text),  # the job whose adapter was reused; this one trained nothing
    sa.Column("error", JSONB),
    sa.Column("trace_parent", sa.Text),  # W3C traceparent of the submitting request
    timestamp("created_at"), timestamp("queued_at", nullable=True), timestamp("started_at", nullable=True),
    timestamp("first_step_at", nullable=True),
    timestamp("heartbeat_at", nullable=True), timestamp("estimated_finish_at", nullable=True), timestamp("finished_at", nullable=True),
    sa.Index("ix_jobs_tenant_created", "tenant_id", "created_at", "id"),
    sa.Index("ix_jobs_counted", "state", "tier"),
    sa.Index("ix_jobs_learned", "finished_at", postgresql_where=sa.text("state = 'succeeded' AND modelled_s > 0")),
    sa.Index("ix_jobs_learned_of_model", "model", "finished_at", postgresql_where=sa.text("state = 'succeeded' AND modelled_s > 0")),
    sa.Index("ix_jobs_partitioned", "finished_at", postgresql_where=sa.text("finished_at IS NOT NULL AND partition_retired_at IS NULL")),
    sa.Index("ix_jobs_first_start", "tier", sa.text("(started_at - GREATEST(created_at, capped_at))")),
    sa.Index("ix_jobs_open", "tenant_id", postgresql_where=sa.text("state NOT IN ('succeeded', 'failed', 'cancelled')")),
)  # fmt: skip

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
    sa.Index("ix_job_events_validation", "job_id", "seq", postgresql_where=sa.text("data ? 'valid_loss'")),
)  # fmt: skip

HAS_VALIDATION = sa.text("job_events.data ? 'valid_loss'")
"""Events that report a validation, worded as in the index over them."""

sweeps = sa.Table(
    "sweeps", metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
    sa.Column("request", JSONB, nullable=False),  # the body shared by all trials, without "sweep"
    sa.Column("settings", JSONB, nullable=False),  # "sweep" of the body, with its seed
    timestamp("created_at"), timestamp("cancelled_at", nullable=True),
    timestamp("submitted_at", nullable=True),  # when every trial had its job, or the reason why it has none
    sa.Column("waits", JSONB),  # why its next trial was refused for now: reason, at, left_s (GPU-seconds, if they are the reason)
    sa.Index("ix_sweeps_tenant_created", "tenant_id", "created_at", "id"),
    sa.Index("ix_sweeps_open", "created_at", postgresql_where=sa.text("submitted_at IS NULL")),
)  # fmt: skip

sweep_trials = sa.Table(
    "sweep_trials", metadata,
    sa.Column("sweep_id", sa.Text, sa.ForeignKey("sweeps.id"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("parameters", JSONB, nullable=False),
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id"), index=True),  # null until there is room for it
    sa.Column("reused", sa.Boolean, nullable=False, server_default=sa.false()),  # the job existed before, and had succeeded
    sa.Column("error", JSONB),  # why it could not be submitted
)  # fmt: skip
