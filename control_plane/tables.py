"""Tables of the control plane (SQLAlchemy Core); migrations live in ``resources/database/migrations``.

Times are timezone-aware; money is integer micro-units (``_micros``); ids are text with a readable prefix.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)


def _time(name: str, *, nullable: bool = False) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


tenants = sa.Table(
    "tenants", metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("tier", sa.Text, nullable=False),
    sa.Column("max_jobs_in_flight", sa.Integer, nullable=False),
    _time("created_at"),
)  # fmt: skip

api_keys = sa.Table(
    "api_keys", metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False, index=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("sha256", sa.Text, nullable=False, unique=True),
    sa.Column("hint", sa.Text, nullable=False),
    sa.Column("scopes", JSONB, nullable=False),
    _time("created_at"), _time("expires_at", nullable=True), _time("revoked_at", nullable=True), _time("last_used_at", nullable=True),
)  # fmt: skip

files = sa.Table(
    "files", metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
    sa.Column("filename", sa.Text, nullable=False),
    sa.Column("purpose", sa.Text, nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("sha256", sa.Text, nullable=False),  # empty until an import is fetched
    sa.Column("object_key", sa.Text, nullable=False),
    sa.Column("column_map", JSONB, nullable=False, server_default="{}"),
    sa.Column("policies", JSONB, nullable=False, server_default="{}"),  # as asked for with the upload
    sa.Column("model", sa.Text),  # base model whose tokenizer counts, if one was named
    sa.Column("source", sa.Text),  # hf://... of an import
    sa.Column("hub_token_given", sa.Boolean, nullable=False, server_default=sa.false()),  # the token itself is never stored
    sa.Column("status", sa.Text, nullable=False),  # uploaded | processed | error
    sa.Column("status_details", sa.Text),
    sa.Column("status_code", sa.Text),  # of a refusal
    sa.Column("progress", JSONB),  # of work that is done: stage, rows, bytes, total_bytes; at, token of its claim
    sa.Column("dataset_id", sa.Text),
    sa.Column("report", JSONB),  # of a refused file too
    _time("created_at"), _time("deleted_at", nullable=True),
    sa.Index("ix_files_tenant_created", "tenant_id", "created_at", "id"),
)  # fmt: skip

datasets = sa.Table(
    "datasets", metadata,
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), primary_key=True),
    sa.Column("id", sa.Text, primary_key=True),  # ds_<hash of content and settings>
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("format", sa.Text, nullable=False),
    sa.Column("content_sha256", sa.Text, nullable=False),
    sa.Column("row_count", sa.BigInteger, nullable=False),
    sa.Column("uri", sa.Text, nullable=False),
    sa.Column("report", JSONB, nullable=False),
    sa.Column("review", sa.Text, nullable=False, server_default="none"),  # none | pending | approved
    _time("approved_at", nullable=True),
    sa.Column("approved_by", sa.Text),  # id of the key that approved it
    _time("cooled_at", nullable=True),  # moved to cold storage
    _time("created_at"),
    sa.UniqueConstraint("tenant_id", "name", "version"),
)  # fmt: skip

eval_suites = sa.Table(
    "eval_suites", metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id")),  # null: the operator's, which every dataset is held against
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("field", sa.Text, nullable=False),
    sa.Column("num_items", sa.Integer, nullable=False),
    sa.Column("sha256", sa.Text, nullable=False),  # of its items
    sa.Column("object_key", sa.Text, nullable=False),
    _time("created_at"),
    sa.UniqueConstraint("tenant_id", "name", postgresql_nulls_not_distinct=True),
)  # fmt: skip

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
    sa.Column("hyperparameters", JSONB, nullable=False),  # as asked; "auto" resolved once prepared
    sa.Column("metadata", JSONB),
    sa.Column("dataset_id", sa.Text),
    sa.Column("pack_fingerprint", sa.Text),
    sa.Column("spec", JSONB),  # frozen training spec
    sa.Column("spec_sha256", sa.Text),
    sa.Column("num_gpus", sa.Integer, nullable=False, server_default="1"),
    sa.Column("expected_s", sa.Float),
    sa.Column("attempt", sa.Integer, nullable=False, server_default="0"),
    sa.Column("prepare_runs", sa.Integer, nullable=False, server_default="0"),
    sa.Column("train_runs", sa.Integer, nullable=False, server_default="0"),  # Dagster runs of the present attempt
    sa.Column("evaluate_runs", sa.Integer, nullable=False, server_default="0"),
    sa.Column("reason", sa.Text),  # why it waits: a reason code
    sa.Column("reason_detail", sa.Text),
    sa.Column("queue_position", sa.Integer),
    sa.Column("step", sa.Integer), sa.Column("total_steps", sa.Integer), sa.Column("loss", sa.Float),
    sa.Column("tokens_per_s", sa.Float),
    sa.Column("trained_tokens", sa.BigInteger),
    sa.Column("evaluation", JSONB),  # progress while it is evaluated: subject, suite, done, total
    sa.Column("checkpointing", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("stop_requested", sa.Text),  # cancel | pause | preempt
    sa.Column("adapter_id", sa.Text),
    sa.Column("fine_tuned_model", sa.Text),
    sa.Column("warm_start", JSONB),  # adapter or checkpoint from which the weights start: adapter, manifest_sha256, rank, ...
    sa.Column("reused_job_id", sa.Text),  # the job whose adapter answers for this one, which trained nothing itself
    sa.Column("error", JSONB),
    _time("created_at"), _time("queued_at", nullable=True), _time("started_at", nullable=True), _time("first_step_at", nullable=True),
    _time("heartbeat_at", nullable=True), _time("estimated_finish_at", nullable=True), _time("finished_at", nullable=True),
    sa.Index("ix_jobs_tenant_created", "tenant_id", "created_at", "id"),
    sa.Index("ix_jobs_counted", "state", "tier"),
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
    _time("created_at"),
    sa.Index("ix_job_events_job_seq", "job_id", "seq"),
    sa.Index("ix_job_events_alerts", "code", "level", postgresql_where=sa.text("level <> 'info'")),
    sa.Index("ix_job_events_validation", "job_id", "seq", postgresql_where=sa.text("data ? 'valid_loss'")),
)  # fmt: skip

HAS_VALIDATION = sa.text("job_events.data ? 'valid_loss'")
"""Events that report a validation, as the index over them is worded."""

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
    _time("raised_at"), _time("cleared_at", nullable=True),
    sa.Index("uq_health_verdicts_raised", "job_id", "code", unique=True, postgresql_where=sa.text("cleared_at IS NULL")),
    sa.Index("ix_health_verdicts_counted", "code", "audience"),
)  # fmt: skip

sweeps = sa.Table(
    "sweeps", metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
    sa.Column("request", JSONB, nullable=False),  # the body that all trials share, without "sweep"
    sa.Column("settings", JSONB, nullable=False),  # "sweep" of the body, with its seed
    _time("created_at"), _time("cancelled_at", nullable=True),
    _time("submitted_at", nullable=True),  # every trial has its job, or the reason why it has none
    sa.Index("ix_sweeps_tenant_created", "tenant_id", "created_at", "id"),
    sa.Index("ix_sweeps_open", "created_at", postgresql_where=sa.text("submitted_at IS NULL")),
)  # fmt: skip

sweep_trials = sa.Table(
    "sweep_trials", metadata,
    sa.Column("sweep_id", sa.Text, sa.ForeignKey("sweeps.id"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("parameters", JSONB, nullable=False),
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id"), index=True),  # null until there is room for it
    sa.Column("reused", sa.Boolean, nullable=False, server_default=sa.false()),  # the job was there before, and had succeeded
    sa.Column("error", JSONB),  # why it could not be submitted
)  # fmt: skip

idempotency_keys = sa.Table(
    "idempotency_keys", metadata,
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), primary_key=True),
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("request_sha256", sa.Text, nullable=False),
    sa.Column("job_id", sa.Text, nullable=False),
    _time("created_at"),
)  # fmt: skip

reservations = sa.Table(
    "reservations", metadata,
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id"), primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True),  # the fencing token
    sa.Column("pool", sa.Text, nullable=False),
    sa.Column("num_gpus", sa.Integer, nullable=False),
    _time("granted_at"), _time("released_at", nullable=True),
    sa.Index("ix_reservations_active", "pool", postgresql_where=sa.text("released_at IS NULL")),
)  # fmt: skip

attempts = sa.Table(
    "attempts", metadata,
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id"), primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True),
    sa.Column("workload", sa.Text, nullable=False),
    sa.Column("outcome", sa.Text),  # failure class, or succeeded; null while it runs
    sa.Column("exit_code", sa.Integer),
    sa.Column("from_step", sa.Integer), sa.Column("last_step", sa.Integer),
    _time("started_at", nullable=True), _time("ended_at", nullable=True),
)  # fmt: skip

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
    _time("created_at"),
    _time("retired_at", nullable=True),  # not kept any more, and nobody reads it
    _time("removed_at", nullable=True),  # and its objects are gone
    sa.UniqueConstraint("job_id", "step"),
)  # fmt: skip

ledger_entries = sa.Table(
    "ledger_entries", metadata,
    sa.Column("id", sa.Text, primary_key=True),  # <job>/a<attempt>/<kind>: one entry, however often it is reported
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False, index=True),
    sa.Column("job_id", sa.Text, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),  # usage | refund
    sa.Column("gpu_type", sa.Text, nullable=False),
    sa.Column("gpu_seconds", sa.Float, nullable=False),
    sa.Column("amount_micros", sa.BigInteger, nullable=False),
    sa.Column("detail", JSONB, nullable=False),
    _time("created_at"),
)  # fmt: skip

adapters = sa.Table(
    "adapters", metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
    sa.Column("name", sa.Text, nullable=False, unique=True),  # ft:<base>:<tenant>:<suffix>:<opaque>
    sa.Column("type", sa.Text, nullable=False),  # lora_adapter | full_model
    sa.Column("base_model", sa.Text, nullable=False),
    sa.Column("base_digest", sa.Text, nullable=False),
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id"), nullable=False, unique=True),
    sa.Column("dataset_id", sa.Text, nullable=False),
    sa.Column("pack_fingerprint", sa.Text, nullable=False),
    sa.Column("spec_sha256", sa.Text, nullable=False),  # of the job's frozen spec; a trigger holds this and the above against the job
    sa.Column("lock_sha256", sa.Text, nullable=False),
    sa.Column("commit", sa.Text, nullable=False),
    sa.Column("metrics", JSONB, nullable=False),
    sa.Column("eval_report_key", sa.Text, nullable=False),
    sa.Column("eval_passed", sa.Boolean, nullable=False),
    sa.Column("rank", sa.Integer), sa.Column("alpha", sa.Float), sa.Column("modules", JSONB, nullable=False),
    sa.Column("object_prefix", sa.Text, nullable=False),
    sa.Column("manifest_sha256", sa.Text, nullable=False),
    sa.Column("stage", sa.Text, nullable=False),
    sa.Column("parent_adapter_id", sa.Text, sa.ForeignKey("adapters.id")),  # of a warm start
    sa.Column("parent_checkpoint_id", sa.Text, sa.ForeignKey("checkpoints.id")),
    sa.Column("approval", sa.Text, nullable=False, server_default="none"),  # none | pending | approved | rejected
    sa.Column("approved_by", sa.Text), _time("approved_at", nullable=True),  # id of the key that approved or rejected it
    sa.Column("approval_note", sa.Text),
    _time("created_at"), _time("promoted_at", nullable=True),
    _time("deprecated_at", nullable=True), _time("archived_at", nullable=True),  # archived: its files are deleted
    sa.ForeignKeyConstraint(["tenant_id", "dataset_id"], ["datasets.tenant_id", "datasets.id"]),
    sa.Index("ix_adapters_tenant_created", "tenant_id", "created_at", "id"),
    sa.Index("ix_adapters_pending", "tenant_id", "created_at", postgresql_where=sa.text("approval = 'pending'")),
    sa.Index("ix_adapters_deprecated", "deprecated_at", postgresql_where=sa.text("stage = 'deprecated'")),
)  # fmt: skip
"""Checks and triggers of the migrations enforce the rest: what a record must hold, that it never changes, how its stage moves."""

adapter_stage_moves = sa.Table(
    "adapter_stage_moves", metadata,
    sa.Column("from_stage", sa.Text, primary_key=True),
    sa.Column("to_stage", sa.Text, primary_key=True),
)  # fmt: skip
"""``ft_assets.adapters.stages.TRANSITIONS``, for the trigger that refuses every other move."""

deployments = sa.Table(
    "deployments", metadata,
    sa.Column("adapter_id", sa.Text, sa.ForeignKey("adapters.id"), primary_key=True),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("desired", sa.Text, nullable=False),  # loaded | unloaded
    sa.Column("observed", sa.Text, nullable=False),  # loaded | unloaded | failed
    sa.Column("detail", sa.Text),
    _time("updated_at"),
    _time("desired_at", nullable=True),  # when `desired` was last written: an unload waits for the requests under way
)  # fmt: skip

replica_adapters = sa.Table(
    "replica_adapters", metadata,
    sa.Column("replica", sa.Text, primary_key=True),  # URL of the inference server
    sa.Column("adapter_id", sa.Text, sa.ForeignKey("adapters.id"), primary_key=True),
    sa.Column("observed", sa.Text, nullable=False),  # loaded | unloaded | failed
    sa.Column("detail", sa.Text),
    sa.Column("failures", sa.Integer, nullable=False, server_default="0"),  # loads that failed for now, since the last success
    _time("updated_at"),
)  # fmt: skip

model_routes = sa.Table(
    "model_routes", metadata,
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),  # what callers put into `model`
    sa.Column("targets", JSONB, nullable=False),  # [{"adapter_id", "base_model", "weight"}]; no adapter: the base itself
    _time("created_at"), _time("updated_at"),
)  # fmt: skip

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
    sa.Column("runs", sa.Integer, nullable=False, server_default="0"),  # Dagster runs that were started for it
    _time("created_at"), _time("started_at", nullable=True), _time("beat_at", nullable=True), _time("finished_at", nullable=True),
    sa.Index("ix_evaluations_adapter", "adapter_id", "base_digest"),
    sa.Index("ix_evaluations_open", "created_at", postgresql_where=sa.text("state IN ('queued', 'running')")),
)  # fmt: skip

deletions = sa.Table(
    "deletions", metadata,
    sa.Column("id", sa.Text, primary_key=True),  # del-...
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False, index=True),
    sa.Column("subject_kind", sa.Text, nullable=False),  # adapter | dataset | tenant
    sa.Column("subject_id", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("proof", JSONB, nullable=False),  # every object with its size and sha256, and that it was looked for afterwards
    sa.Column("sha256", sa.Text, nullable=False),  # of the proof and of the previous deletion's: a chain
    sa.Column("previous_sha256", sa.Text),
    sa.Column("seq", sa.BigInteger, sa.Identity(), nullable=False, unique=True),  # order of the chain
    _time("requested_at"), _time("done_at"),
)  # fmt: skip

deletion_requests = sa.Table(
    "deletion_requests", metadata,
    sa.Column("id", sa.Text, primary_key=True),  # del-...: that of the proof that follows
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
    sa.Column("subject_kind", sa.Text, nullable=False),  # adapter | tenant
    sa.Column("subject_id", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("requested_by", sa.Text, nullable=False),  # id of a key, operator, or retention
    sa.Column("waiting_for", sa.Text),  # why it is not done yet
    sa.Column("removed", JSONB, nullable=False, server_default="[]"),  # directories of this platform's machines, with what they held
    _time("requested_at"),
    _time("absent_at", nullable=True),  # when nothing of it was found; a second look follows before it is done
    _time("done_at", nullable=True),
    sa.Index("ix_deletion_requests_tenant_id", "tenant_id"),
    sa.Index(
        "uq_deletion_requests_open", "subject_kind", "subject_id", unique=True, postgresql_where=sa.text("done_at IS NULL")
    ),
)  # fmt: skip

deletion_objects = sa.Table(
    "deletion_objects", metadata,
    sa.Column("deletion_id", sa.Text, sa.ForeignKey("deletion_requests.id"), primary_key=True),
    sa.Column("object_key", sa.Text, primary_key=True),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("sha256", sa.Text, primary_key=True),  # read from the store before it was deleted; a key can come again with other bytes
    _time("deleted_at", nullable=True),
)  # fmt: skip
"""What a deletion has found and what of it is gone; moves into the proof at its end."""

mirrors = sa.Table(
    "mirrors", metadata,
    sa.Column("name", sa.Text, primary_key=True),  # mlflow
    sa.Column("digest", sa.Text, nullable=False),  # of what was mirrored last
    _time("mirrored_at"),
    sa.Column("error", sa.Text),  # why the last attempt did not arrive
    _time("failed_at", nullable=True),
)  # fmt: skip

exports = sa.Table(
    "exports", metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
    sa.Column("adapter_id", sa.Text, sa.ForeignKey("adapters.id"), nullable=False),
    sa.Column("key", sa.Text, nullable=False),  # of what it is made of: adapter's manifest, base, format, precision
    sa.Column("format", sa.Text, nullable=False),  # adapter | merged | gguf | tokenizer
    sa.Column("precision", sa.Text),  # of gguf: f32 | f16 | q8_0
    sa.Column("status", sa.Text, nullable=False),  # queued | running | ready | failed
    sa.Column("error", JSONB),
    sa.Column("progress", JSONB),
    sa.Column("claim", sa.Text),  # token of whoever makes it
    sa.Column("object_key", sa.Text), sa.Column("bytes", sa.BigInteger), sa.Column("sha256", sa.Text),
    sa.Column("manifest", JSONB),
    _time("created_at"), _time("beat_at", nullable=True), _time("finished_at", nullable=True),
    sa.UniqueConstraint("tenant_id", "adapter_id", "key"),
)  # fmt: skip

eval_scores = sa.Table(
    "eval_scores", metadata,
    sa.Column("subject_digest", sa.Text, primary_key=True),  # base model, or base model and adapter manifest; "@" and where
    sa.Column("suite_digest", sa.Text, primary_key=True),  # one suite's items and decoding settings
    sa.Column("suite", sa.Text, nullable=False),  # its id
    sa.Column("scores", JSONB, nullable=False),  # its answers, as the runner leaves them
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), index=True),  # whose items they answer; null: the platform's own
    _time("created_at"),
    sa.Index("ix_eval_scores_suite", "subject_digest", "suite", "created_at"),
)  # fmt: skip
