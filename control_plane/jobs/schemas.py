"""Jobs and what belongs to them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from control_plane.jobs.submission import canonical_body
from control_plane.queue.status.schemas import Ahead, Reservation
from control_plane.quotas.schemas import JobQuota


class CreateJob(BaseModel):
    """A fine-tuning job as asked for. Fields past `hyperparameters` are the platform's own (``extra_body`` of the client).

    Names that other services use are read too: `base_model` for `model`; `lora_rank`, `lora_alpha` and `lora_target_modules`, at the
    top level or in `hyperparameters`, for `rank`, `alpha` and `target_modules`.
    """

    model_config = ConfigDict(extra="allow", strict=True)  # unknown fields are refused by name, further in

    @model_validator(mode="before")
    @classmethod
    def _canonical(cls, body: Any) -> Any:
        return canonical_body(body) if isinstance(body, dict) else body

    model: str = Field(description="Base model: an id of GET /v1/models.")
    training_file: str = Field(description="Id of an uploaded file with purpose fine-tune.")
    validation_file: str | None = None
    suffix: str | None = Field(None, description="At most 64 characters; part of the adapter's name.")
    seed: int | None = Field(None, description="0 to 2147483647; drawn if absent.")
    metadata: dict[str, str] | None = Field(None, description="At most 16 pairs.")
    integrations: list[dict[str, Any]] | None = Field(None, description="Refused unless empty: nothing is sent to other services.")
    method: str | dict[str, Any] | None = Field(
        None,
        description='`{"type": "supervised", "supervised": {"hyperparameters": {...}}}`, likewise `dpo`, `orpo`, `kto`, `simpo`, `cpt`, '
        "`sft`; or one of these words; or `lora`, `qlora`, `full` for SFT with that adapter.",
    )
    hyperparameters: dict[str, Any] | None = Field(None, description="Deprecated by OpenAI in favour of `method`; read all the same.")
    eval_config: dict[str, Any] | None = Field(None, description="Suites and gates; the defaults apply where absent.")
    tier: str | None = Field(None, description="free, standard or premium; the tenant's own if absent.")
    spot: bool | None = Field(None, description="It may run on spot GPUs first: if it is not premium and takes 4 h or more.")
    recipe: str | None = Field(None, description="`<name>@<version>`; chosen by the model if absent.")
    hardware: dict[str, Any] | None = Field(
        None, description="`num_gpus` (1, 2, 4, 8, 16, 32) and `strategy` (single, ddp, fsdp2, zero1, zero2, zero3); estimated if absent."
    )
    adapter: str | None = Field(None, description="lora (if absent), qlora or full.")
    auto_promote: bool | None = Field(None, description="Serve the adapter once it has passed its gates; true if absent.")
    warm_start: str | None = Field(
        None, description="Adapter (id or model name), job or checkpoint of yours to start from; `model` may name an adapter, too."
    )
    force: bool | None = Field(
        None, description="Train even where an earlier job of yours has trained the same, or an equal one was submitted just now."
    )
    idempotency_key: str | None = Field(None, description="As the header Idempotency-Key: the same key is the same job.")


class JobError(BaseModel):
    code: str
    message: str
    param: str | None


class WarmStart(BaseModel):
    """The adapter or checkpoint from which a job's weights start."""

    adapter: str
    adapter_id: str | None = None
    checkpoint_id: str | None = None
    manifest_sha256: str


class EvaluationProgress(BaseModel):
    """How far the evaluation of a job's adapter is."""

    phase: str | None = Field(description="setup, loading, capability, answering, proof, classifying, judging or done.")
    subject: str | None = Field(description="Who answers: base, adapter or previous (the last accepted adapter).")
    suite: str | None
    done: int | None = Field(description="Requests that have an answer, of all subjects and suites together.")
    total: int | None
    eta_s: float | None = Field(description="Seconds that the rest takes at the pace so far.")


class Job(BaseModel):
    """A fine-tuning job. Fields past `error` are the platform's own."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    finished_at: int | None
    estimated_finish: int | None
    model: str
    fine_tuned_model: str | None
    organization_id: str
    status: str
    training_file: str
    validation_file: str | None
    result_files: list[str]
    trained_tokens: int | None
    seed: int
    hyperparameters: dict[str, Any]
    method: dict[str, Any]
    integrations: list[dict[str, Any]] | None
    metadata: dict[str, str] | None
    error: JobError | None
    state: str = Field(description="validating, queued, provisioning, running, evaluating, succeeded, failed, cancelled, ...")
    checkpointing: bool
    queue_position: int | None
    reason: str | None = Field(description="Why it waits: a code.")
    reason_detail: str | None = Field(description="The same in words.")
    ahead: Ahead | None = Field(description="Who is before it in the queue, in kind.")
    reservation: Reservation | None = Field(description="GPUs that it has from then on, while it waits for them.")
    due_at: int | None = Field(description="While it waits: from then on no job of its tier that comes later is placed before it.")
    preemptions: int = Field(description="How often it gave its GPUs to another job, and came back.")
    queued_at: int | None
    started_at: int | None
    estimated_start: int | None = Field(description="While it waits: when it is expected to start. Null: nobody can tell.")
    step: int | None
    total_steps: int | None
    loss: float | None
    tokens_per_s: float | None
    evaluation: EvaluationProgress | None = Field(description="Progress, while it is evaluated.")
    cost_micros: int = Field(description="So far, in millionths of a US dollar; the sum of the job's ledger entries.")
    attempt: int
    suffix: str | None
    tier: str
    promised_start: int | None = Field(description="By then the tier promises a start. Null: best effort, the wait has no bound.")
    sla_missed: bool = Field(description="It had not begun by then. A job that is paused or cancelled before its start misses nothing.")
    spot: bool
    recipe: str | None
    auto_promote: bool
    adapter: str = Field(description="lora, qlora or full.")
    hardware: dict[str, Any] | None = Field(description="`num_gpus` and `strategy`: as planned once the data is packed, before as asked.")
    eval_config: dict[str, Any] | None = Field(description="As asked.")
    base_digest: str
    dataset_id: str | None = Field(description="The immutable dataset version; null until it is pinned.")
    spec_sha256: str | None
    adapter_id: str | None
    warm_start: WarmStart | None = Field(description="What the weights started from.")
    sweep_id: str | None = Field(description="Of a job that a sweep submitted.")
    reused: bool = Field(description="The result is that of an earlier job, which trained the same; nothing was trained or billed.")
    reused_job_id: str | None = Field(description="That job, where it is another one than this.")
    report_url: str = Field(description="The validation report of the training data.")
    trace_id: str | None = Field(description="Of the OpenTelemetry trace that the job belongs to, where traces are recorded.")
    quota: JobQuota | None = Field(None, description="In the answer to a submission: what the job takes of the month.")


class Event(BaseModel):
    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: str
    type: str
    code: str | None
    message: str
    data: dict[str, Any] | None


class EstimatedTokens(BaseModel):
    per_epoch: int
    error: int = Field(description="Half width of the 95 % interval; 0 where they were counted.")
    counted: bool
    how: str
    total: int


class Estimate(BaseModel):
    """What a job would take and cost."""

    object: Literal["fine_tuning.estimate"] = "fine_tuning.estimate"
    model: str
    training_file: str
    dataset_id: str
    num_examples: int = Field(description="Trained on, once the split has held some out.")
    max_seq_len: int
    n_epochs: float
    tokens: EstimatedTokens
    total_steps: int
    num_gpus: int
    gpu_type: str
    tier: str
    gpu_hours: float
    price_micros: int = Field(description="In millionths of a US dollar.")
    seconds_to_start: float | None = Field(description="In the queue; null where no start can be foreseen.")
    seconds_to_finish: float | None
    estimated_start: int | None
    estimated_finish: int | None
    starts_within_s: float | None = Field(description="What the tier promises. Null: best effort, the wait has no bound.")
    quota: JobQuota = Field(description="What the job would take of the month.")
    recipe: str
    memory: dict[str, Any] = Field(description="Of each GPU, part by part, and how the job is placed for it.")
    assumptions: list[str] = Field(description="What the numbers rest on, in words.")


class Checkpoint(BaseModel):
    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    step_number: int
    metrics: dict[str, Any]
    final: bool
