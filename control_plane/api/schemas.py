"""What goes over the wire: OpenAI's objects with the platform's own fields beside them. Shapes only; ``render`` fills them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

T = TypeVar("T")


class CreateJob(BaseModel):
    """A fine-tuning job as asked for. Fields past `hyperparameters` are the platform's own (``extra_body`` of the client)."""

    model_config = ConfigDict(extra="allow", strict=True)  # unknown fields are refused by name, further in

    model: str = Field(description="Base model: an id of GET /v1/models.")
    training_file: str = Field(description="Id of an uploaded file with purpose fine-tune.")
    validation_file: str | None = None
    suffix: str | None = Field(None, description="At most 64 characters; part of the adapter's name.")
    seed: int | None = Field(None, description="0 to 2147483647; drawn if absent.")
    metadata: dict[str, str] | None = Field(None, description="At most 16 pairs.")
    integrations: list[dict[str, Any]] | None = None
    method: str | dict[str, Any] | None = Field(
        None,
        description='`{"type": "supervised", "supervised": {"hyperparameters": {...}}}`, likewise `dpo`, `orpo`, `kto`, `simpo`, `cpt`, '
        "`sft`; or one of these words; or `lora`, `qlora`, `full` for SFT with that adapter.",
    )
    hyperparameters: dict[str, Any] | None = Field(None, description="Deprecated by OpenAI in favour of `method`; read all the same.")
    eval_config: dict[str, Any] | None = Field(None, description="Suites and gates; the defaults apply where absent.")
    tier: str | None = Field(None, description="free, standard or premium; the tenant's own if absent.")
    spot: bool | None = None
    recipe: str | None = Field(None, description="`<name>@<version>`; chosen by the model if absent.")
    hardware: dict[str, Any] | None = Field(
        None, description="`num_gpus` (1, 2, 4, 8, 16, 32) and `strategy` (single, ddp, fsdp2, zero1, zero2, zero3); estimated if absent."
    )
    adapter: str | None = Field(None, description="lora (if absent), qlora or full.")
    auto_promote: bool | None = Field(None, description="Serve the adapter once it has passed its gates; true if absent.")
    warm_start: str | None = Field(
        None, description="Adapter (id or model name), job or checkpoint of yours to start from; `model` may name an adapter, too."
    )
    force: bool | None = Field(None, description="Train even where an earlier job of yours has trained the same.")
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
    reason_detail: str | None
    queued_at: int | None
    started_at: int | None
    estimated_start: int | None
    step: int | None
    total_steps: int | None
    loss: float | None
    tokens_per_s: float | None
    cost_micros: int = Field(description="So far, in millionths of a US dollar; the sum of the job's ledger entries.")
    attempt: int
    suffix: str | None
    tier: str
    spot: bool
    recipe: str | None
    auto_promote: bool
    adapter: str = Field(description="lora, qlora or full.")
    base_digest: str
    dataset_id: str | None = Field(description="The immutable dataset version; null until it is pinned.")
    spec_sha256: str | None
    adapter_id: str | None
    warm_start: WarmStart | None = Field(description="What the weights started from.")
    sweep_id: str | None = Field(description="Of a job that a sweep submitted.")
    reused: bool = Field(description="The result is that of an earlier job, which trained the same; nothing was trained or billed.")
    reused_job_id: str | None = Field(description="That job, where it is another one than this.")
    report_url: str = Field(description="The validation report of the training data.")


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


class Progress(BaseModel):
    """How far a validation is."""

    stage: str
    rows: int
    bytes: int
    total_bytes: int = Field(description="0 where it is not known.")


class File(BaseModel):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str
    status_details: str | None
    sha256: str
    dataset_id: str | None
    report_url: str | None
    status_code: str | None = Field(description="Of a refused file: why, as a code.")
    policies: dict[str, Any] = Field(description="As asked for with the upload; the report holds all of them.")
    model: str | None = Field(description="Base model whose tokens the report counts.")
    source: str | None = Field(description="hf://... of an import.")
    progress: Progress | None = Field(description="Of a fetch or a validation that runs; GET /v1/files/{id}/events streams it.")


class FileEvent(BaseModel):
    object: Literal["file.event"] = "file.event"
    file_id: str
    status: str
    status_details: str | None
    dataset_id: str | None
    progress: Progress | None


class Dataset(BaseModel):
    """An immutable dataset version."""

    id: str
    object: Literal["dataset"] = "dataset"
    name: str
    version: int
    format: str
    row_count: int
    token_count: int | None = Field(description="Null where no base model counted its tokens.")
    dedup_removed: int
    contamination_flagged: int
    uri: str
    review: str = Field(description="none, pending (no job trains on it yet), approved.")
    approved_at: int | None
    approved_by: str | None = Field(description="Id of the key that approved it.")
    report_url: str
    created_at: int


class ImportDataset(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    hub_id: str = Field(description="`hf://owner/name` with a pinned revision, as `ft check` takes it.")
    column_map: dict[str, str] | None = None
    policies: dict[str, Any] | None = None
    model: str | None = Field(None, description="Base model whose tokenizer counts.")
    hub_token: str | None = Field(None, description="Yours, for a dataset that is not public. It is used for the fetch and never stored.")


class Suite(BaseModel):
    """An evaluation suite that datasets are held against."""

    id: str
    object: Literal["eval_suite"] = "eval_suite"
    name: str
    owner: str = Field(description="operator, or tenant.")
    field: str
    num_items: int
    sha256: str
    created_at: int


class Deleted(BaseModel):
    id: str
    object: str
    deleted: bool = True


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    base_model: str
    stage: str | None
    adapter_id: str | None
    license: str | None = Field(None, description="Of a base model, as the fields below.")
    context_length: int | None = Field(None, description="Tokens in one example at most.")
    num_parameters: int | None = None
    repo: str | None = None
    revision: str | None = None
    digest: str | None = Field(None, description="sha256 over weights, tokenizer, template and config.")
    deprecated_since: date | None = Field(None, description="First day on which new jobs are refused.")


class RecipeDefault(BaseModel):
    value: Any
    source: str


class Recipe(BaseModel):
    """Defaults of jobs for a kind of adapter and models of a family or size."""

    id: str = Field(description="`<name>@<version>`: what a job's `recipe` takes.")
    object: Literal["recipe"] = "recipe"
    name: str
    version: int
    adapter: str
    method: str = Field(description="The method whose defaults are shown.")
    summary: str
    base_models: list[str] = Field(description="Patterns of base model ids; empty: any.")
    min_parameters: int
    max_parameters: int | None = Field(description="Sizes below this; null: no limit.")
    defaults: dict[str, RecipeDefault]


class Adapter(BaseModel):
    id: str
    object: Literal["adapter"] = "adapter"
    name: str = Field(description="What a request puts into `model`.")
    type: str
    stage: str
    base_model: str
    base_digest: str
    job_id: str
    dataset_id: str
    pack_fingerprint: str
    spec_sha256: str
    lock_sha256: str
    commit: str
    metrics: dict[str, Any]
    eval_passed: bool
    rank: int | None
    alpha: float | None
    modules: list[str]
    manifest_sha256: str
    parent_adapter_id: str | None = Field(description="The adapter that its training started from.")
    parent_checkpoint_id: str | None
    created_at: int
    promoted_at: int | None
    desired: str = Field(description="On the inference servers: loaded or unloaded.")
    observed: str
    detail: str | None = Field(description="Why `observed` is not `desired`, where it is not.")


class CreateExport(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    format: str = Field(description="adapter, merged, gguf or tokenizer.")
    precision: str | None = Field(None, description="Of gguf: f32, f16 or q8_0; f16 if absent.")


class Export(BaseModel):
    id: str
    object: Literal["adapter.export"] = "adapter.export"
    adapter_id: str
    format: str
    precision: str | None
    status: str = Field(description="queued, running, ready or failed.")
    progress: dict[str, Any] | None = Field(description="While it is made: the stage, and seconds so far.")
    error: JobError | None
    bytes: int | None = Field(description="Of the archive.")
    sha256: str | None
    manifest: dict[str, Any] | None = Field(description="Lineage, files with their hashes, and the proof that they answer as they should.")
    content_url: str | None
    created_at: int
    finished_at: int | None


class RolledBack(BaseModel):
    object: Literal["adapter.rollback"] = "adapter.rollback"
    withdrawn: Adapter
    serving: Adapter


class CreateKey(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(min_length=1, max_length=100)
    scopes: list[str] = Field(default=["read", "write"], description="read, write, admin; each includes the ones before it.")
    expires_in: int | None = Field(None, description="Seconds; never if absent.")


class ApiKey(BaseModel):
    id: str
    object: Literal["api_key"] = "api_key"
    name: str
    hint: str
    scopes: list[str]
    created_at: int
    expires_at: int | None
    revoked_at: int | None
    last_used_at: int | None


class NewApiKey(ApiKey):
    secret: str = Field(description="Shown now and never again.")


class ListOf(BaseModel, Generic[T]):
    object: Literal["list"] = "list"
    data: Sequence[T]
    has_more: bool = False
