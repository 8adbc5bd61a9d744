"""What the client's methods return, for type checkers and editors: records with the fields of the API's schemas.

Written by ``python -m tools.client_types``; docs/api.md describes the fields.
"""

from __future__ import annotations

from typing import Any, Literal

from ft_client.record import Record


class Adapter(Record):
    """A fine-tuned model in the registry: a LoRA adapter or a whole model, with its lineage and stage."""

    alpha: float | None
    approval: str
    approval_note: str | None
    approved_at: int | None
    approved_by: str | None
    archived_at: int | None
    base_digest: str
    base_model: str
    commit: str
    created_at: int
    dataset_id: str
    dataset_ids: list[str]
    deprecated_at: int | None
    desired: str
    detail: str | None
    eval_passed: bool
    id: str
    job_id: str
    lock_sha256: str
    manifest_sha256: str
    metrics: dict[str, Any]
    modules: list[str]
    name: str
    object: Literal["adapter"]
    observed: str
    pack_fingerprint: str
    parent_adapter_id: str | None
    parent_checkpoint_id: str | None
    promoted_at: int | None
    rank: int | None
    release_reason: str | None
    released_at: int | None
    released_by: str | None
    spec_sha256: str
    stage: str
    type: str


class AdapterEvaluation(Record):
    """An evaluation of a registered adapter."""

    adapter_id: str
    base_digest: str
    base_model: str
    created_at: int
    error: JobError | None
    eval_config: dict[str, Any] | None
    finished_at: int | None
    id: str
    job_id: str
    kind: str
    object: Literal["adapter.evaluation"]
    outcome: str | None
    reasons: list[str] | None
    runs: int
    started_at: int | None
    state: str


class AdapterEvaluationReport(Record):
    """Report of a finished evaluation of an adapter."""

    adapter_id: str
    advice: list[EvaluationAdvice]
    id: str
    job_id: str
    next_run: dict[str, Any]
    object: Literal["adapter.evaluation.report"]
    report: dict[str, Any]
    samples_url: str
    verdict: EvaluationVerdict


class AdapterLimits(Record):
    """Limits of one kind of adapter on a base model."""

    defaults: DefaultFit
    name: str
    ranks: list[int]
    tiers: list[str]


class Ahead(Record):
    """Jobs ahead of a job in the queue, as counts."""

    jobs: dict[str, int]
    num_gpus: int
    yours: int


class ApiKey(Record):
    """An API key, without its secret."""

    created_at: int
    expires_at: int | None
    hint: str
    id: str
    last_used_at: int | None
    member_id: str | None
    name: str
    object: Literal["api_key"]
    requests_per_minute: int | None
    revoked_at: int | None
    scopes: list[str]


class AuditActor(Record):
    """Who made a change."""

    email: str | None
    id: str
    member_id: str | None
    name: str | None
    type: str


class AuditLine(Record):
    """One change of one object."""

    action: str
    actor: AuditActor
    changes: dict[str, Any]
    created_at: int
    id: str
    ip: str | None
    object: Literal["audit_log.line"]
    object_id: str
    object_type: str
    redacted_at: int | None
    request_id: str | None
    tenant_id: str | None
    user_agent: str | None


class Balance(Record):
    """Balance of a tenant's ledger."""

    balance_micros: int
    object: Literal["ledger.balance"]


class Budget(Record):
    """A monthly amount, with thresholds at which you are notified. It does not limit spending."""

    alerted: list[int]
    created_at: int
    id: str
    limit_micros: int
    name: str
    object: Literal["budget"]
    spent_micros: int
    thresholds: list[int]
    updated_at: int


class CapabilitySuite(Record):
    """A suite of general tasks on which an adapter must not fall behind its base model."""

    default: bool
    name: str
    num_fewshot: int | None
    num_items: int | None
    object: Literal["capability_suite"]
    output: str | None
    ready: bool
    reason: str | None
    shipped: bool
    version: str | None


class Checkpoint(Record):
    """A checkpoint saved during training."""

    created_at: int
    final: bool
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    id: str
    metrics: dict[str, Any]
    object: Literal["fine_tuning.job.checkpoint"]
    step_number: int


class CheckpointPermission(Record):
    """Record that a project may use a checkpoint. It has no effect, because a tenant can always use its own checkpoints."""

    created_at: int
    id: str
    object: Literal["checkpoint.permission"]
    project_id: str


class ComparedJob(Record):
    """One job in a comparison."""

    cost_micros: int
    duration_s: float | None
    eval_loss: float | None
    eval_metrics: dict[str, float]
    final_loss: float | None
    fine_tuned_model: str | None
    hyperparameters: dict[str, Any]
    id: str
    status: str
    trained_tokens: int | None


class Dataset(Record):
    """An immutable dataset version, made from a validated file."""

    approved_at: int | None
    approved_by: str | None
    contamination_flagged: int | None
    contamination_suites: list[str]
    created_at: int
    dedup_removed: int
    format: str
    id: str
    name: str
    object: Literal["dataset"]
    report_url: str
    review: str
    row_count: int
    token_count: int | None
    uri: str
    version: int


class DeadLetter(Record):
    """A job that was given up after repeated failures of the platform."""

    attempt: int
    error: dict[str, Any] | None
    finished_at: int | None
    id: str
    model: str
    num_gpus: int
    object: Literal["dead_letter"]
    state: str
    step: int | None
    tenant: str
    tier: str
    total_steps: int | None


class DefaultFit(Record):
    """Resources that a supervised job with its recipe's defaults would use, according to the memory estimate made at submission."""

    max_seq_len: int | None
    num_gpus: int | None
    per_device_batch_size: int | None
    refused: JobError | None
    strategy: str | None


class Deleted(Record):
    """Confirmation that an object was deleted."""

    deleted: bool
    id: str
    object: str


class DeletedWebhookEndpoint(Record):
    """Confirmation that a webhook endpoint was deleted."""

    deleted: bool
    id: str
    object: Literal["webhook_endpoint.deleted"]


class Deletion(Record):
    """Deletion of an adapter's files or of all data of a tenant, with its proof."""

    closes_account: bool
    done_at: int | None
    id: str
    object: Literal["deletion"]
    previous_sha256: str | None
    proof: dict[str, Any] | None
    reason: str
    requested_at: int
    requested_by: str
    sha256: str | None
    status: Literal["in_progress", "done"]
    subject_id: str
    subject_kind: str
    waiting_for: str | None


class EnvelopeSignature(Record):
    """One signature of an envelope."""

    keyid: str
    sig: str


class Estimate(Record):
    """Estimated resources, duration and cost of a job, without submitting it."""

    assumptions: list[str]
    dataset_id: str
    estimated_finish: int | None
    estimated_start: int | None
    gpu_hours: float
    gpu_type: str
    max_seq_len: int
    memory: dict[str, Any]
    model: str
    n_epochs: float
    num_examples: int
    num_gpus: int
    object: Literal["fine_tuning.estimate"]
    price_micros: int
    quota: JobQuota
    recipe: str
    result: EstimatedResult
    seconds_to_finish: float | None
    seconds_to_start: float | None
    starts_within_s: float | None
    tier: str
    tokens: EstimatedTokens
    total_steps: int
    training_file: str
    training_files: list[EstimatedFile] | None


class EstimatedFile(Record):
    """How much of a mixture's file an epoch would read."""

    dataset_id: str
    file: str
    repeats: float
    tokens: int


class EstimatedResult(Record):
    """The model that a job would make, and whether vLLM can serve it."""

    detail: str
    rank: int | None
    serving: Literal["shared_server", "own_server", "none"]
    type: Literal["lora_adapter", "full_model"]


class EstimatedTokens(Record):
    """Tokens of the training data, counted or estimated."""

    counted: bool
    error: int
    how: str
    per_epoch: int
    total: int


class EvaluationAdvice(Record):
    """A suggestion for the next training run. It never blocks an adapter."""

    changes: dict[str, Any]
    code: str
    evidence: dict[str, Any]
    message: str


class EvaluationProgress(Record):
    """Progress of the evaluation that follows training."""

    done: int | None
    eta_s: float | None
    phase: str | None
    subject: str | None
    suite: str | None
    total: int | None


class EvaluationSample(Record):
    """One item of an evaluation, with the answers of the base model, the adapter and the last accepted adapter."""

    adapter: str
    base: str
    change: Literal["better", "worse", "changed", "same"]
    expected: str
    id: str
    item_id: str
    judge: Literal["win", "draw", "loss"] | None
    metric: str | None
    object: Literal["fine_tuning.job.evaluation.sample"]
    previous: str | None
    prompt: str
    reasoning: dict[str, str] | None
    scores: dict[str, dict[str, float]] | None
    suite: str


class EvaluationVerdict(Record):
    """Outcome of an evaluation, with the result of every rule."""

    basis: Literal["answers", "judge", "preferences", "perplexity", "nothing"] | None
    findings: list[Finding]
    mode: Literal["gate", "experiment", "monitor", "off"]
    outcome: Literal["passed", "quarantined"]
    reasons: list[str]
    rests_on: str
    warnings: list[str]


class Event(Record):
    """Something that happened to a job: a state change, a measured step or a warning."""

    code: str | None
    created_at: int
    data: dict[str, Any] | None
    id: str
    level: str
    message: str
    object: Literal["fine_tuning.job.event"]
    type: str


class Export(Record):
    """An archive of an adapter's files in a format of your choice."""

    adapter_id: str
    bytes: int | None
    content_url: str | None
    created_at: int
    error: JobError | None
    finished_at: int | None
    format: str
    id: str
    manifest: dict[str, Any] | None
    object: Literal["adapter.export"]
    precision: str | None
    progress: dict[str, Any] | None
    sha256: str | None
    signature: Signature | None
    status: str


class File(Record):
    """An uploaded or imported file, or a result file of a job."""

    bytes: int
    column_map: dict[str, str]
    created_at: int
    dataset_id: str | None
    expires_at: int | None
    filename: str
    id: str
    model: str | None
    object: Literal["file"]
    policies: dict[str, Any]
    progress: Progress | None
    purpose: str
    report_url: str | None
    sha256: str
    source: str | None
    status: str
    status_code: str | None
    status_details: str | None


class Finding(Record):
    """Result of one rule of the evaluation gate."""

    blocking: bool
    code: str
    detail: str
    next_step: str
    passed: bool
    rule: str


class GraderErrors(Record):
    """What went wrong while grading, as flags."""

    formula_parse_error: bool
    invalid_variable_error: bool
    model_grader_parse_error: bool
    model_grader_refusal_error: bool
    model_grader_server_error: bool
    model_grader_server_error_details: str | None
    other_error: bool
    python_grader_runtime_error: bool
    python_grader_runtime_error_details: str | None
    python_grader_server_error: bool
    python_grader_server_error_type: str | None
    sample_parse_error: bool
    truncated_observation_error: bool
    unresponsive_reward_error: bool


class GraderRun(Record):
    """Result of running a grader."""

    metadata: GraderRunMetadata
    model_grader_token_usage_per_model: dict[str, int]
    reward: float
    sub_rewards: dict[str, float]


class GraderRunMetadata(Record):
    """How a grader ran."""

    errors: GraderErrors
    execution_time: float
    name: str
    sampled_model_name: str | None
    scores: dict[str, float]
    token_usage: int | None
    type: str


class Integration(Record):
    """An account at another service, without its key."""

    created_at: int
    hint: str
    object: Literal["integration"]
    type: Literal["wandb"]
    updated_at: int


class Invoice(Record):
    """The invoice of a month, with its lines."""

    adjustment_micros: int
    currency: Literal["USD"]
    gpu_seconds: float
    id: str
    issued_at: int | None
    lines: list[InvoiceLine]
    month: str
    object: Literal["invoice"]
    overage: Overage | None
    period_end: int
    period_start: int
    refund_micros: int
    refunded_gpu_seconds: float
    sha256: str
    spot_savings_micros: int
    status: Literal["draft", "issued"]
    storage_micros: int
    tenant: InvoicedTenant
    total_micros: int
    total_usd: str
    unbilled: list[UnbilledAttempt]
    usage_micros: int


class InvoiceLine(Record):
    """A line of an invoice: one ledger entry."""

    amount_micros: int
    attempt: int | None
    description: str
    entry_id: str
    gpu_seconds: float
    gpu_type: str | None
    job_id: str | None
    kind: str
    late: bool
    list_micros: int
    model: str | None
    occurred_at: str
    pricing: str | None


class InvoiceSummary(Record):
    """An invoice without its lines."""

    id: str
    issued_at: int | None
    month: str
    object: Literal["invoice"]
    sha256: str
    status: Literal["draft", "issued"]
    total_micros: int


class InvoicedTenant(Record):
    """The tenant an invoice is for."""

    id: str
    name: str
    tier: str


class Job(Record):
    """A fine-tuning job."""

    adapter: str
    adapter_id: str | None
    ahead: Ahead | None
    api_key_id: str | None
    attempt: int
    auto_promote: bool
    base_digest: str
    checkpointing: bool
    cost_micros: int
    created_at: int
    dataset_id: str | None
    due_at: int | None
    error: JobError | None
    estimated_finish: int | None
    estimated_start: int | None
    eval_config: dict[str, Any] | None
    evaluation: EvaluationProgress | None
    fine_tuned_model: str | None
    finished_at: int | None
    hardware: dict[str, Any] | None
    hyperparameters: dict[str, Any]
    id: str
    integrations: list[dict[str, Any]] | None
    loss: float | None
    metadata: dict[str, str] | None
    method: dict[str, Any]
    model: str
    object: Literal["fine_tuning.job"]
    organization_id: str
    preemptions: int
    promised_start: int | None
    queue_position: int | None
    queued_at: int | None
    quota: JobQuota | None
    reason: str | None
    reason_detail: str | None
    recipe: str | None
    report_url: str
    reservation: Reservation | None
    result_files: list[str]
    reused: bool
    reused_job_id: str | None
    seed: int
    sla_missed: bool
    spec_sha256: str | None
    spot: bool
    started_at: int | None
    state: str
    status: str
    step: int | None
    suffix: str | None
    sweep_id: str | None
    tier: str
    tokens_per_s: float | None
    total_steps: int | None
    trace_id: str | None
    trained_tokens: int | None
    training_file: str
    training_files: list[JobFile] | None
    unbilled_micros: int
    validation_file: str | None
    warm_start: WarmStart | None


class JobComparison(Record):
    """Jobs side by side."""

    differing: dict[str, list[Any]]
    jobs: list[ComparedJob]
    object: Literal["fine_tuning.comparison"]


class JobCost(Record):
    """Cost of a job, entry by entry."""

    entries: list[LedgerEntry]
    job_id: str
    object: Literal["fine_tuning.job.cost"]
    refund_cases: list[RefundCase]
    total: UsageTotal
    unbilled: list[UnbilledAttempt]


class JobError(Record):
    """Why something failed or was refused."""

    code: str
    message: str
    param: str | None


class JobEvaluation(Record):
    """Evaluation of a job's adapter."""

    advice: list[EvaluationAdvice]
    job_id: str
    next_run: dict[str, Any]
    object: Literal["fine_tuning.job.evaluation"]
    report: dict[str, Any]
    samples_url: str
    verdict: EvaluationVerdict


class JobFile(Record):
    """A training file of a job's mixture."""

    dataset_id: str | None
    file: str
    rows_per_epoch: int | None
    tokens: int | None
    weight: float | None


class JobQuota(Record):
    """Effect of one job on its tenant's GPU-hours of the month."""

    counted: bool
    fits: bool
    goes_into_overage: bool
    hard_gpu_hours: float | None
    held_gpu_hours: float
    job_gpu_hours: float
    left_gpu_hours: float | None
    month: str
    on_hard_cap: str
    overage_gpu_hours: float
    soft_gpu_hours: float | None
    used_gpu_hours: float


class LedgerCheck(Record):
    """Result of a check of the ledger."""

    differences: list[LedgerDifference]
    num_entries: int
    num_intervals: int
    num_invoices: int
    object: Literal["ledger.check"]
    total_micros: int


class LedgerDifference(Record):
    """A discrepancy in the ledger."""

    code: str
    detail: str
    id: str


class LedgerEntry(Record):
    """An entry of the ledger: GPU time, storage, a refund or an adjustment."""

    amount_micros: int
    attempt: int | None
    detail: dict[str, Any]
    gpu_seconds: float
    gpu_type: str | None
    id: str
    job_id: str | None
    kind: str
    list_micros: int
    object: Literal["ledger.entry"]
    occurred_at: int
    pricing: str | None


class Lineage(Record):
    """Origin of a model, traced from its name back to the uploaded files."""

    adapters: list[dict[str, Any]]
    base_model: dict[str, Any] | None
    holds: bool | None
    kind: Literal["base_model", "route", "logical_name", "adapter"]
    model: str
    object: Literal["lineage"]


class Me(Record):
    """The caller: its tenant, limits, API key and member."""

    key: ApiKey | None
    limits: TenantLimits
    member: Member | None
    object: Literal["me"]
    requests_per_minute: int
    scopes: list[str]
    tenant_id: str
    tenant_name: str
    tier: str


class Member(Record):
    """A person who belongs to a tenant."""

    created_at: int
    email: str
    id: str
    name: str
    notify: bool
    object: Literal["member"]
    removed_at: int | None
    role: str


class MethodLimits(Record):
    """A training method and the hyperparameters specific to it."""

    hyperparameters: dict[str, ValueLimit]
    name: str
    rows: list[str]


class Model(Record):
    """A model that can be named in requests: a base model, one of your adapters, or a model route."""

    adapter_id: str | None
    added_tokens: list[str] | None
    base_model: str
    context_length: int | None
    created: int
    deprecated_since: str | None
    digest: str | None
    id: str
    license: str | None
    num_parameters: int | None
    object: Literal["model"]
    owned_by: str
    repo: str | None
    revision: str | None
    stage: str | None
    type: str


class ModelLimits(Record):
    """Limits for jobs on a base model."""

    accepts_jobs: bool
    adapters: list[AdapterLimits]
    context_length: int | None
    hyperparameters: dict[str, ValueLimit]
    max_metadata_pairs: int
    max_seed: int
    max_suffix_length: int
    methods: list[MethodLimits]
    model: str
    num_gpus: list[int]
    num_parameters: int | None
    object: Literal["fine_tuning.model_limits"]
    strategies: list[str]
    unavailable: str | None


class ModelRoute(Record):
    """A name you choose that requests can pass as `model`, resolved to weighted targets."""

    created_at: int
    name: str
    object: Literal["model_route"]
    targets: list[RoutedTarget]
    updated_at: int


class NewApiKey(Record):
    """An API key with its secret, which is returned only when the key is created."""

    created_at: int
    expires_at: int | None
    hint: str
    id: str
    last_used_at: int | None
    member_id: str | None
    name: str
    object: Literal["api_key"]
    requests_per_minute: int | None
    revoked_at: int | None
    scopes: list[str]
    secret: str


class NewTenant(Record):
    """A new tenant with its first API key."""

    api_key: NewApiKey
    closed_at: int | None
    id: str
    limits: TenantLimits
    name: str
    object: Literal["tenant"]
    suspended_at: int | None
    suspended_reason: str | None
    tier: str


class Node(Record):
    """A node of a pool."""

    drained_at: int | None
    drained_by: str | None
    fabric: str | None
    gpu_type: str
    id: str
    num_gpus: int
    num_jobs: int
    object: Literal["node"]
    pool: str
    reason: str | None
    state: str
    used_gpus: int


class NodeState(Record):
    """A node of a pool."""

    fabric: str
    free_gpus: int
    jobs: dict[str, int]
    name: str
    num_gpus: int
    ready: bool
    reserved_for: list[str]


class OperatorPlacedJob(Record):
    """A job that holds GPUs, as operators see it."""

    attempt: int
    backfill: bool
    estimated_end: int | None
    evaluation: EvaluationProgress | None
    id: str
    kind: Literal["train", "evaluate", "export"]
    model: str
    num_gpus: int
    num_nodes: int
    overrun_s: float
    placement: list[list[Any]]
    pool: str
    preemptions: int
    since: int
    state: str
    step: int | None
    stop_asked_at: int | None
    stopped_for: str | None
    stopping: bool
    tenant: str
    tier: str
    total_steps: int | None


class OperatorPool(Record):
    """A pool as operators see it, with its nodes."""

    draining_gpus: int
    free_gpus: int
    gpu_type: str
    largest_free: int
    max_gpus_per_job: int
    name: str
    nodes: list[NodeState]
    num_gpus: int
    packing: str
    pricing: str
    reserved_gpus: int
    takes: list[str]
    unusable_gpus: int
    used_gpus: int


class OperatorQueue(Record):
    """The whole queue, with pools, tenants and the state of the scheduler."""

    by_tier: dict[str, int]
    length: int
    object: Literal["queue"]
    overdue: list[OverdueRelease]
    pools: list[OperatorPool]
    running: list[OperatorPlacedJob]
    scheduler: SchedulerState
    tenants: list[TenantShare]
    waiting: list[OperatorQueuedJob]


class OperatorQueuedJob(Record):
    """A waiting job as operators see it."""

    ahead: Ahead | None
    due_at: int | None
    estimated_finish: int | None
    estimated_start: int | None
    expected_s: float | None
    id: str
    job_class: str
    model: str
    num_gpus: int
    position: int | None
    preemptions: int
    queued_at: int | None
    reason: str | None
    reason_detail: str | None
    reservation: OperatorReservation | None
    spot: bool
    summary: str
    tenant: str
    tier: str
    waited_s: float


class OperatorRefundCase(Record):
    """A refund case as operators see it."""

    amount_micros: int
    attempt: int
    created_at: int
    decided_at: int | None
    decided_by: str | None
    id: str
    job_id: str
    note: str | None
    object: Literal["refund_case"]
    outcome: str
    state: Literal["pending", "granted", "refused"]
    tenant: str


class OperatorReservation(Record):
    """A reservation as operators see it, with its nodes."""

    made_at: int
    num_nodes: int
    placement: list[list[Any]]
    pool: str
    start: int


class Overage(Record):
    """GPU time of the month beyond the soft limit. Its price is already part of the lines."""

    overage_gpu_hours: float
    overage_micros: int
    soft_gpu_hours: float
    used_gpu_hours: float


class OverdueRelease(Record):
    """A job that has not started although it was released, or has not stopped although it was asked to."""

    age_s: float
    attempt: int
    job_id: str
    kind: Literal["start", "stop"]
    num_gpus: int
    pool: str


class PermissionList(Record):
    """One page of permissions on a checkpoint."""

    data: list[CheckpointPermission]
    first_id: str | None
    has_more: bool
    last_id: str | None
    object: Literal["list"]


class PlacedJob(Record):
    """A job that holds GPUs."""

    attempt: int
    estimated_end: int | None
    evaluation: EvaluationProgress | None
    id: str
    kind: Literal["train", "evaluate", "export"]
    model: str
    num_gpus: int
    num_nodes: int
    pool: str
    preemptions: int
    since: int
    state: str
    step: int | None
    stopping: bool
    tier: str
    total_steps: int | None


class PoolSums(Record):
    """GPU counts of a pool."""

    draining_gpus: int
    free_gpus: int
    gpu_type: str
    largest_free: int
    max_gpus_per_job: int
    name: str
    num_gpus: int
    pricing: str
    reserved_gpus: int
    takes: list[str]
    used_gpus: int


class Progress(Record):
    """Progress of the fetch or validation of a file."""

    bytes: int
    rows: int
    stage: str
    total_bytes: int


class Queue(Record):
    """Your jobs in the queue, and the rest of the queue as counts."""

    by_tier: dict[str, int]
    last_round_at: int | None
    length: int
    object: Literal["queue"]
    pools: list[PoolSums]
    preparing: int
    running: list[PlacedJob]
    waiting: list[QueuedJob]
    waiting_evaluations: list[WaitingEvaluation]


class QueuedJob(Record):
    """A waiting job."""

    ahead: Ahead | None
    due_at: int | None
    estimated_finish: int | None
    estimated_start: int | None
    id: str
    model: str
    num_gpus: int
    position: int | None
    preemptions: int
    queued_at: int | None
    reason: str | None
    reason_detail: str | None
    reservation: Reservation | None
    spot: bool
    summary: str
    tier: str
    waited_s: float


class Quota(Record):
    """Limits of a tenant and its usage this month."""

    at_hard_cap: bool
    hard_gpu_hours: float | None
    held_gpu_hours: float
    jobs_in_flight: int
    jobs_paused_for_cap: int
    left_gpu_hours: float | None
    max_examples: int
    max_file_bytes: int
    max_jobs_in_flight: int
    may_train_full: bool
    month: str
    month_ends_at: int
    object: Literal["quota"]
    on_hard_cap: str
    overage_gpu_hours: float
    requests_per_minute: int
    running_gpu_hours: float
    soft_gpu_hours: float | None
    starts_within_s: float | None
    tenant: str
    tier: str
    used_gpu_hours: float


class Recipe(Record):
    """Defaults for jobs with one kind of adapter on base models of a certain family or size."""

    adapter: str
    base_models: list[str]
    defaults: dict[str, RecipeDefault]
    id: str
    max_parameters: int | None
    method: str
    min_parameters: int
    name: str
    object: Literal["recipe"]
    summary: str
    version: int


class RecipeDefault(Record):
    """The default of one hyperparameter."""

    source: str
    value: Any


class RecipeVersion(Record):
    """A version of a recipe that an operator added."""

    adapter: str
    added_at: int
    added_by: str
    base_models: list[str]
    id: str
    name: str
    object: Literal["recipe_version"]
    retired_at: int | None
    summary: str
    version: int


class RefundCase(Record):
    """An attempt whose failure may be the platform's fault, for an operator to decide on."""

    amount_micros: int
    attempt: int
    created_at: int
    decided_at: int | None
    id: str
    job_id: str
    note: str | None
    object: Literal["refund_case"]
    outcome: str
    state: Literal["pending", "granted", "refused"]


class RemovedMember(Record):
    """Confirmation that a member was removed."""

    deleted: bool
    id: str
    object: Literal["member"]
    revoked_keys: int


class Replayed(Record):
    """Number of deliveries sent again."""

    object: Literal["webhook_endpoint.replay"]
    replayed: int
    webhook_endpoint_id: str


class Reservation(Record):
    """GPUs reserved for a waiting job from a later time on."""

    num_nodes: int
    pool: str
    start: int


class RolledBack(Record):
    """Result of a rollback."""

    object: Literal["adapter.rollback"]
    serving: Adapter
    withdrawn: Adapter


class RoutedTarget(Record):
    """A target of a model route as it is served now."""

    adapter_id: str | None
    model: str
    served: bool
    share: float
    stage: str | None
    weight: int


class SchedulerState(Record):
    """Scheduler counters since the platform was installed."""

    backfills: int
    last_round_at: int | None
    last_round_s: float | None
    preemptions: int
    reservations: int
    rounds: int
    slipped: int
    starts: int


class ScoredSuite(Record):
    """A version of one of your scored suites."""

    created_at: int
    grader: dict[str, Any] | None
    id: str
    max_drop: float
    metric: str
    min_score: float | None
    name: str
    num_items: int
    object: Literal["scored_suite"]
    sha256: str
    version: int


class Signature(Record):
    """The signature of an adapter or export: a DSSE envelope with an in-toto statement about its manifest and files."""

    payload: str
    payloadType: str
    signatures: list[EnvelopeSignature]


class SigningKey(Record):
    """A public key with which the platform signs, as a JSON Web Key (RFC 8037)."""

    alg: Literal["EdDSA"]
    crv: Literal["Ed25519"]
    kid: str
    kty: Literal["OKP"]
    use: Literal["sig"]
    x: str


class SigningKeySet(Record):
    """The public keys that verify signatures of the platform."""


class StoredBytes(Record):
    """Bytes stored by a tenant on one day."""

    bytes: dict[str, int]
    day: str


class Suite(Record):
    """A contamination list: items that no row of a dataset should repeat, such as those of a public benchmark."""

    created_at: int | None
    field: str
    id: str
    name: str
    num_items: int
    object: Literal["eval_suite"]
    owner: str
    sha256: str


class Sweep(Record):
    """A search over hyperparameters: one job per combination."""

    best: SweepTrial | None
    cancelled_at: int | None
    cost_micros: int
    counts: SweepCounts
    created_at: int
    goal: str
    id: str
    max_jobs: int
    metric: str
    model: str
    object: Literal["fine_tuning.sweep"]
    parameters: dict[str, Any]
    seed: int
    status: str
    strategy: str
    training_file: str
    trials: list[SweepTrial]
    waiting_reason: str | None


class SweepCounts(Record):
    """Trials of a sweep, counted by status."""

    cancelled: int
    failed: int
    running: int
    succeeded: int
    total: int
    waiting: int


class SweepTrial(Record):
    """One combination of hyperparameters, and the job that tries it."""

    adapter_id: str | None
    cost_micros: int
    error: JobError | None
    fine_tuned_model: str | None
    job_id: str | None
    number: int
    parameters: dict[str, Any]
    reused: bool
    status: str
    value: float | None


class Tenant(Record):
    """A tenant, as operators see it."""

    closed_at: int | None
    id: str
    limits: TenantLimits
    name: str
    object: Literal["tenant"]
    suspended_at: int | None
    suspended_reason: str | None
    tier: str


class TenantLimits(Record):
    """Limits of a tenant: its own where an operator set them, otherwise those of its tier."""

    hard_gpu_hours: float | None
    max_jobs_in_flight: int
    requests_per_minute: int
    soft_gpu_hours: float | None


class TenantShare(Record):
    """A tenant's share of the cluster."""

    num_gpus: int
    running: int
    tenant: str
    used_gpu_hours: float
    waiting: int


class TrialBalance(Record):
    """Balances of all accounts of the ledger."""

    accounts: dict[str, int]
    object: Literal["ledger.trial_balance"]
    receivables: dict[str, int]
    total_micros: int


class UnbilledAttempt(Record):
    """An attempt that is not billed yet, with what it would cost if it ended now."""

    amount_micros: int
    attempt: int
    gpu_seconds: float
    gpu_type: str
    job_id: str
    model: str
    pricing: str
    since: int
    tenant: str


class Upload(Record):
    """A file being uploaded in parts."""

    bytes: int
    created_at: int
    expires_at: int
    file: File | None
    filename: str
    id: str
    mime_type: str
    object: Literal["upload"]
    purpose: str
    received_bytes: int
    status: str


class UploadPart(Record):
    """A stored part of an upload."""

    bytes: int
    created_at: int
    id: str
    object: Literal["upload.part"]
    sha256: str
    upload_id: str


class UploadWithParts(Record):
    """A file being uploaded in parts, with the parts stored so far."""

    bytes: int
    created_at: int
    expires_at: int
    file: File | None
    filename: str
    id: str
    mime_type: str
    object: Literal["upload"]
    parts: list[UploadPart]
    purpose: str
    received_bytes: int
    status: str


class Usage(Record):
    """Usage over time."""

    bucket_width: Literal["hour", "day", "month"]
    data: list[UsageBucket]
    end_time: int
    group_by: list[str]
    object: Literal["usage"]
    start_time: int
    stored: StoredBytes | None
    total: UsageTotal
    unbilled: list[UnbilledAttempt]


class UsageBucket(Record):
    """Usage within one hour, day or month."""

    end_time: int
    object: Literal["bucket"]
    results: list[UsageResult]
    start_time: int


class UsageResult(Record):
    """Usage of one group within a time bucket."""

    adjustment_micros: int
    amount_micros: int
    api_key_id: str | None
    gpu_seconds: float
    gpu_type: str | None
    job_id: str | None
    kind: str | None
    metadata: dict[str, str | None] | None
    model: str | None
    object: Literal["usage.result"]
    pricing: str | None
    refund_micros: int
    refunded_gpu_seconds: float
    spot_savings_micros: int
    storage_micros: int
    tenant: str | None
    usage_micros: int


class UsageTotal(Record):
    """Sums of usage and money. Money is in micro-dollars: 1,000,000 is one US dollar."""

    adjustment_micros: int
    amount_micros: int
    gpu_seconds: float
    refund_micros: int
    refunded_gpu_seconds: float
    spot_savings_micros: int
    storage_micros: int
    usage_micros: int


class ValidatedGrader(Record):
    """A grader that passed validation."""

    grader: dict[str, Any]


class ValueLimit(Record):
    """Values that a hyperparameter accepts."""

    allowed: list[int | str] | None
    because: str | None
    exclusive_minimum: bool
    maximum: float | None
    minimum: float | None
    text: str
    type: str


class WaitingEvaluation(Record):
    """A trained job that waits for GPUs for its evaluation. It goes before new trainings of its tier and has no position."""

    id: str
    model: str
    num_gpus: int
    reason: str | None
    reason_detail: str | None
    tier: str


class WarmStart(Record):
    """The model or checkpoint whose weights a job's training starts from."""

    adapter: str
    adapter_id: str | None
    checkpoint_id: str | None
    manifest_sha256: str


class WebhookDelivery(Record):
    """The delivery of one event to one endpoint."""

    attempts: int
    created_at: int
    delivered_at: int | None
    event_id: str
    event_type: str
    id: str
    last_attempt_at: int | None
    last_error: str | None
    last_status_code: int | None
    next_attempt_at: int | None
    object: Literal["webhook_delivery"]
    state: Literal["pending", "delivered", "dead"]
    subject: str
    webhook_endpoint_id: str


class WebhookEndpoint(Record):
    """A URL that events are sent to."""

    created_at: int
    disabled_reason: str | None
    event_types: list[str]
    failing_since: int | None
    id: str
    name: str
    object: Literal["webhook_endpoint"]
    signing_secret_hint: str
    state: Literal["enabled", "disabled"]
    updated_at: int
    url: str


class WebhookEndpointWithSecret(Record):
    """A webhook endpoint with its signing secret, which is returned only when the secret is created."""

    created_at: int
    disabled_reason: str | None
    event_types: list[str]
    failing_since: int | None
    id: str
    name: str
    object: Literal["webhook_endpoint"]
    signing_secret: str
    signing_secret_hint: str
    state: Literal["enabled", "disabled"]
    updated_at: int
    url: str


class WebhookTestResult(Record):
    """The receiver's response to a test event."""

    event_type: str
    object: Literal["webhook_endpoint.test"]
    response: str
    status_code: int
    success: Literal[True]
    webhook_endpoint_id: str
