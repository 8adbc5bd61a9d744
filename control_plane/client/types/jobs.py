# Written by `python -m tools.client` from the API's OpenAPI document: change that, and run it again.
"""Objects of the API: jobs."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from control_plane.client.types.queue import Ahead, Reservation
from control_plane.client.types.quotas import JobQuota


class AdapterLimits(TypedDict):
    name: str
    """lora, qlora or full."""
    ranks: list[int]
    tiers: list[str]
    """Tiers whose jobs may train this."""
    defaults: DefaultFit


class Checkpoint(TypedDict):
    id: str
    object: NotRequired[Literal["fine_tuning.job.checkpoint"]]
    created_at: int
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    step_number: int
    metrics: dict[str, Any]
    final: bool


class ComparedJob(TypedDict):
    id: str
    status: str
    fine_tuned_model: str | None
    hyperparameters: dict[str, Any]
    """All of them, as resolved; as asked, until the spec is frozen."""
    final_loss: float | None
    eval_loss: float | None
    eval_metrics: dict[str, float]
    """Scores of the eval report, `<suite>/<metric>`; the base model's under `base/`."""
    trained_tokens: int | None
    cost_micros: int
    duration_s: float | None


class CreateJob(TypedDict):
    """A fine-tuning job as asked for. Fields past `hyperparameters` are the platform's own (``extra_body`` of the client). Names
    that other services use are read too: `base_model` for `model`; `lora_rank`, `lora_alpha` and `lora_target_modules`, at the
    top level or in `hyperparameters`, for `rank`, `alpha` and `target_modules`."""

    model: str
    """Base model: an id of GET /v1/models."""
    training_file: str
    """Id of an uploaded file with purpose fine-tune."""
    validation_file: NotRequired[str | None]
    suffix: NotRequired[str | None]
    """At most 64 characters; part of the adapter's name."""
    seed: NotRequired[int | None]
    """0 to 2147483647; drawn if absent."""
    metadata: NotRequired[dict[str, str] | None]
    """At most 16 pairs."""
    integrations: NotRequired[list[dict[str, Any]] | None]
    """Refused unless empty: nothing is sent to other services."""
    method: NotRequired[str | dict[str, Any] | None]
    """`{"type": "supervised", "supervised": {"hyperparameters": {...}}}`, likewise `dpo`, `orpo`, `kto`, `simpo`, `cpt`, `sft`; or
    one of these words; or `lora`, `qlora`, `full` for SFT with that adapter."""
    hyperparameters: NotRequired[dict[str, Any] | None]
    """Deprecated by OpenAI in favour of `method`; read all the same."""
    eval_config: NotRequired[dict[str, Any] | None]
    """Suites and gates; the defaults apply where absent."""
    tier: NotRequired[str | None]
    """free, standard or premium; the tenant's own if absent."""
    spot: NotRequired[bool | None]
    """It may run on spot GPUs first: if it is not premium and takes 4 h or more."""
    recipe: NotRequired[str | None]
    """`<name>@<version>`; chosen by the model if absent."""
    hardware: NotRequired[dict[str, Any] | None]
    """`num_gpus` (1, 2, 4, 8, 16, 32) and `strategy` (single, ddp, fsdp2, zero1, zero2, zero3); estimated if absent."""
    adapter: NotRequired[str | None]
    """lora (if absent), qlora or full."""
    auto_promote: NotRequired[bool | None]
    """Serve the adapter once it has passed its gates; true if absent."""
    warm_start: NotRequired[str | None]
    """Adapter (id or model name), job or checkpoint of yours to start from; `model` may name an adapter, too."""
    force: NotRequired[bool | None]
    """Train even where an earlier job of yours has trained the same, or an equal one was submitted just now."""
    idempotency_key: NotRequired[str | None]
    """As the header Idempotency-Key: the same key is the same job."""


class CreateSweep(TypedDict):
    """The body of a job, and how its hyperparameters vary. The jobs are served on promotion only, unless `auto_promote` is true."""

    model: str
    """Base model: an id of GET /v1/models."""
    training_file: str
    """Id of an uploaded file with purpose fine-tune."""
    validation_file: NotRequired[str | None]
    suffix: NotRequired[str | None]
    """At most 64 characters; part of the adapter's name."""
    seed: NotRequired[int | None]
    """0 to 2147483647; drawn if absent."""
    metadata: NotRequired[dict[str, str] | None]
    """At most 16 pairs."""
    integrations: NotRequired[list[dict[str, Any]] | None]
    """Refused unless empty: nothing is sent to other services."""
    method: NotRequired[str | dict[str, Any] | None]
    """`{"type": "supervised", "supervised": {"hyperparameters": {...}}}`, likewise `dpo`, `orpo`, `kto`, `simpo`, `cpt`, `sft`; or
    one of these words; or `lora`, `qlora`, `full` for SFT with that adapter."""
    hyperparameters: NotRequired[dict[str, Any] | None]
    """Deprecated by OpenAI in favour of `method`; read all the same."""
    eval_config: NotRequired[dict[str, Any] | None]
    """Suites and gates; the defaults apply where absent."""
    tier: NotRequired[str | None]
    """free, standard or premium; the tenant's own if absent."""
    spot: NotRequired[bool | None]
    """It may run on spot GPUs first: if it is not premium and takes 4 h or more."""
    recipe: NotRequired[str | None]
    """`<name>@<version>`; chosen by the model if absent."""
    hardware: NotRequired[dict[str, Any] | None]
    """`num_gpus` (1, 2, 4, 8, 16, 32) and `strategy` (single, ddp, fsdp2, zero1, zero2, zero3); estimated if absent."""
    adapter: NotRequired[str | None]
    """lora (if absent), qlora or full."""
    auto_promote: NotRequired[bool | None]
    """Serve the adapter once it has passed its gates; true if absent."""
    warm_start: NotRequired[str | None]
    """Adapter (id or model name), job or checkpoint of yours to start from; `model` may name an adapter, too."""
    force: NotRequired[bool | None]
    """Train even where an earlier job of yours has trained the same, or an equal one was submitted just now."""
    idempotency_key: NotRequired[str | None]
    """As the header Idempotency-Key: the same key is the same job."""
    sweep: SweepSettings


class DefaultFit(TypedDict):
    """With a recipe's defaults for SFT, by the memory estimate that submission makes."""

    num_gpus: int | None
    strategy: str | None
    per_device_batch_size: int | None
    max_seq_len: int | None
    refused: JobError | None
    """Why a job with the defaults would be refused; null: it would not."""


class Estimate(TypedDict):
    """What a job would take and cost."""

    object: NotRequired[Literal["fine_tuning.estimate"]]
    model: str
    training_file: str
    dataset_id: str
    num_examples: int
    """Trained on, once the split has held some out."""
    max_seq_len: int
    n_epochs: float
    tokens: EstimatedTokens
    total_steps: int
    num_gpus: int
    gpu_type: str
    tier: str
    gpu_hours: float
    price_micros: int
    """In millionths of a US dollar."""
    seconds_to_start: float | None
    """In the queue; null where no start can be foreseen."""
    seconds_to_finish: float | None
    estimated_start: int | None
    estimated_finish: int | None
    starts_within_s: float | None
    """What the tier promises. Null: best effort, the wait has no bound."""
    quota: JobQuota
    """What the job would take of the month."""
    recipe: str
    memory: dict[str, Any]
    """Of each GPU, part by part, and how the job is placed for it."""
    assumptions: list[str]
    """What the numbers rest on, in words."""


class EstimatedTokens(TypedDict):
    per_epoch: int
    error: int
    """Half width of the 95 % interval; 0 where they were counted."""
    counted: bool
    how: str
    total: int


class EvaluationProgress(TypedDict):
    """How far the evaluation of a job's adapter is."""

    phase: str | None
    """setup, loading, capability, answering, proof, classifying, judging or done."""
    subject: str | None
    """Who answers: base, adapter or previous (the last accepted adapter)."""
    suite: str | None
    done: int | None
    """Requests that have an answer, of all subjects and suites together."""
    total: int | None
    eta_s: float | None
    """Seconds that the rest takes at the pace so far."""


class Event(TypedDict):
    id: str
    object: NotRequired[Literal["fine_tuning.job.event"]]
    created_at: int
    level: str
    type: str
    code: str | None
    message: str
    data: dict[str, Any] | None


class Job(TypedDict):
    """A fine-tuning job. Fields past `error` are the platform's own."""

    id: str
    object: NotRequired[Literal["fine_tuning.job"]]
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
    state: str
    """validating, queued, provisioning, running, evaluating, succeeded, failed, cancelled, ..."""
    checkpointing: bool
    queue_position: int | None
    reason: str | None
    """Why it waits: a code."""
    reason_detail: str | None
    """The same in words."""
    ahead: Ahead | None
    """Who is before it in the queue, in kind."""
    reservation: Reservation | None
    """GPUs that it has from then on, while it waits for them."""
    due_at: int | None
    """While it waits: from then on no job of its tier that comes later is placed before it."""
    preemptions: int
    """How often it gave its GPUs to another job, and came back."""
    queued_at: int | None
    started_at: int | None
    estimated_start: int | None
    """While it waits: when it is expected to start. Null: nobody can tell."""
    step: int | None
    total_steps: int | None
    loss: float | None
    tokens_per_s: float | None
    evaluation: EvaluationProgress | None
    """Progress, while it is evaluated."""
    cost_micros: int
    """So far, in millionths of a US dollar; the sum of the job's ledger entries."""
    attempt: int
    suffix: str | None
    tier: str
    promised_start: int | None
    """By then the tier promises a start. Null: best effort, the wait has no bound."""
    sla_missed: bool
    """It had not begun by then. A job that is paused or cancelled before its start misses nothing."""
    spot: bool
    recipe: str | None
    auto_promote: bool
    adapter: str
    """lora, qlora or full."""
    hardware: dict[str, Any] | None
    """`num_gpus` and `strategy`: as planned once the data is packed, before as asked."""
    eval_config: dict[str, Any] | None
    """As asked."""
    base_digest: str
    dataset_id: str | None
    """The immutable dataset version; null until it is pinned."""
    spec_sha256: str | None
    adapter_id: str | None
    warm_start: WarmStart | None
    """What the weights started from."""
    sweep_id: str | None
    """Of a job that a sweep submitted."""
    reused: bool
    """The result is that of an earlier job, which trained the same; nothing was trained or billed."""
    reused_job_id: str | None
    """That job, where it is another one than this."""
    report_url: str
    """The validation report of the training data."""
    trace_id: str | None
    """Of the OpenTelemetry trace that the job belongs to, where traces are recorded."""
    quota: NotRequired[JobQuota | None]
    """In the answer to a submission: what the job takes of the month."""


class JobComparison(TypedDict):
    object: NotRequired[Literal["fine_tuning.comparison"]]
    differing: dict[str, list[Any]]
    """Hyperparameters that differ, with their values in the order of `jobs`."""
    jobs: list[ComparedJob]


class JobError(TypedDict):
    code: str
    message: str
    param: str | None


class MethodLimits(TypedDict):
    name: str
    rows: list[str]
    """Kinds of rows that it trains on: chat, preference, kto, text."""
    hyperparameters: dict[str, ValueLimit]
    """Those that only this method has."""


class ModelLimits(TypedDict):
    object: NotRequired[Literal["fine_tuning.model_limits"]]
    model: str
    accepts_jobs: bool
    unavailable: str | None
    """Why it takes no jobs now."""
    context_length: int | None
    num_parameters: int | None
    methods: list[MethodLimits]
    adapters: list[AdapterLimits]
    hyperparameters: dict[str, ValueLimit]
    """Of every method."""
    num_gpus: list[int]
    """Numbers of GPUs that a job may ask for here."""
    strategies: list[str]
    max_suffix_length: int
    max_seed: int
    max_metadata_pairs: int


class PreviewRequest(TypedDict):
    model: str
    """Base model whose template and tokenizer are used."""
    training_file: str
    """Id of a validated file, or of a dataset version."""
    num_examples: NotRequired[int]
    """1 to 100."""
    max_seq_len: NotRequired[int | None]
    """The model's context length if absent."""


class Sweep(TypedDict):
    id: str
    object: NotRequired[Literal["fine_tuning.sweep"]]
    created_at: int
    cancelled_at: int | None
    status: str
    """running, succeeded (some trial did), failed, cancelled."""
    model: str
    training_file: str
    strategy: str
    parameters: dict[str, Any]
    max_jobs: int
    seed: int
    metric: str
    goal: str
    trials: list[SweepTrial]
    counts: SweepCounts
    waiting_reason: str | None
    """Why the next trial waits, as its submission was told; null when none was refused."""
    best: SweepTrial | None
    """Of the trials that have succeeded so far, by the metric."""
    cost_micros: int


class SweepCounts(TypedDict):
    total: int
    waiting: int
    running: int
    succeeded: int
    failed: int
    cancelled: int


class SweepSettings(TypedDict):
    """What varies, and what best means."""

    strategy: NotRequired[str | None]
    """grid (if absent): every combination; or random."""
    parameters: dict[str, Any]
    """Hyperparameters, each a list of values; for random also a range `{"min": 1e-5, "max": 1e-3, "scale": "log"}`."""
    max_jobs: NotRequired[int | None]
    """At most so many jobs, up to 100; needed for random."""
    seed: NotRequired[int | None]
    """Of the draws, and of the training of all trials unless the body has a seed."""
    metric: NotRequired[str | None]
    """eval_loss (if absent), train_loss, or `<suite>/<metric>` of the eval report."""
    goal: NotRequired[str | None]
    """minimize or maximize; needed where the metric is neither a loss nor a perplexity."""


class SweepTrial(TypedDict):
    number: int
    parameters: dict[str, Any]
    status: str
    """waiting (for room among the jobs in flight), refused, or the status of its job."""
    job_id: str | None
    reused: bool
    """An earlier job had done the same; it is the answer."""
    fine_tuned_model: str | None
    value: float | None
    """Of the sweep's metric."""
    cost_micros: int
    error: JobError | None


class ValueLimit(TypedDict):
    type: str
    """int, float, word, flag or modules."""
    minimum: float | None
    exclusive_minimum: bool
    maximum: float | None
    allowed: list[int | str] | None
    text: str
    """The same in words, as in the refusal."""
    because: str | None


class WarmStart(TypedDict):
    """The adapter or checkpoint from which a job's weights start."""

    adapter: str
    adapter_id: NotRequired[str | None]
    checkpoint_id: NotRequired[str | None]
    manifest_sha256: str
