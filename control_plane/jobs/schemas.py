"""Jobs, their events, checkpoints and estimates."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, model_validator

from control_plane.http.schemas import ApiModel, EpochSeconds, JsonObject
from control_plane.jobs.submission import canonical_body
from control_plane.queue.status.schemas import Ahead, Reservation
from control_plane.quotas.schemas import JobQuota


class MixedFile(ApiModel):
    """A training file of a mixture."""

    model_config = ConfigDict(extra="allow", strict=True)  # unknown fields are refused by name, further in

    file: str
    """Id of an uploaded file with purpose `fine-tune`."""
    weight: float | None = None
    """Share of the file among the files with a weight: they read as many tokens an epoch as they have together, in proportion to their
    weights. Above 0, at most 1000000."""
    tokens: int | None = None
    """Tokens of the file that an epoch reads: some rows again if it has fewer, others in the next epoch if it has more."""


class JobFile(ApiModel):
    """A training file of a job's mixture."""

    file: str
    """Id of the file."""
    weight: float | None
    """Weight, as requested; null if none was given."""
    tokens: int | None
    """Tokens an epoch reads, as requested; null if none were given."""
    dataset_id: str | None
    """Id of the immutable dataset version trained on; null until the data is prepared."""
    rows_per_epoch: int | None
    """Packed rows that an epoch reads; null until the data is prepared."""


class CreateJob(ApiModel):
    """A fine-tuning job to submit.

    OpenAI's fields come first; the fields after `hyperparameters` are extensions of this platform, which the OpenAI client sends with
    `extra_body`.

    Names used by other services are accepted too: `base_model` for `model`, and `lora_rank`, `lora_alpha` and `lora_target_modules` (at the
    top level or in `hyperparameters`) for `rank`, `alpha` and `target_modules`.
    """

    model_config = ConfigDict(extra="allow", strict=True)  # unknown fields are refused by name, further in

    @model_validator(mode="before")
    @classmethod
    def _canonical(cls, body: Any) -> Any:
        return canonical_body(body) if isinstance(body, dict) else body

    model: str
    """Id of the base model to fine-tune, as listed by `GET /v1/models`. One of your adapters, jobs or checkpoints also works: training
    then continues from its weights, as with `warm_start`."""
    training_file: str | None = None
    """Id of an uploaded file with purpose `fine-tune`. It may still be validating; a file that failed validation is refused. Required,
    unless `training_files` is given."""
    validation_file: str | None = None
    """Id of a second uploaded file, used to measure validation loss. If absent, the rows marked as its own validation split are used, or
    else 2 to 10% of the training file is held out."""
    suffix: str | None = None
    """Text that becomes part of the fine-tuned model's name: at most 64 letters, digits, `-`, `_` and `.`, starting with a letter or
    digit."""
    seed: int | None = None
    """Seed for data order and weight initialization, 0 to 2147483647. A random seed is drawn if absent."""
    metadata: dict[str, str] | None = None
    """Up to 16 key-value pairs, returned with the job and usable as a filter. Keys have at most 64 characters, values at most 512."""
    integrations: list[JsonObject] | None = None
    """Sends the metrics to Weights & Biases with the key that you stored; at most one:
    `[{"type": "wandb", "wandb": {"project": ..., "name": ..., "entity": ..., "tags": [...]}}]`."""
    method: str | JsonObject | None = None
    """Training method, as an object such as `{"type": "dpo", "dpo": {"hyperparameters": {...}}}` or as one word: `supervised` (or `sft`),
    `dpo`, `orpo`, `kto`, `simpo` or `cpt`. `lora`, `qlora` and `full` mean supervised fine-tuning with that kind of adapter. Default:
    `supervised`."""
    hyperparameters: JsonObject | None = None
    """Hyperparameters by name; each may be `"auto"`. Deprecated by OpenAI in favor of `method` but still accepted; set them in one place
    only. `GET /v1/fine_tuning/model_limits` lists names and bounds."""
    eval_config: JsonObject | None = None
    """Settings of the evaluation that follows training: suites, thresholds, `mode` (`experiment`: the job succeeds whatever its verdict,
    which counts once the model is promoted), `approval`. Omitted keys use their defaults; unknown keys are refused."""
    tier: str | None = None
    """Tier to run the job in: `free`, `standard` or `premium`, no higher than your tenant's own tier, which is the default."""
    spot: bool | None = None
    """Allow the job to run on cheaper spot GPUs that can be taken away. Takes effect only outside the premium tier, for jobs expected to
    run at least 4 hours, and not for a job whose model is to replace one in production. Default: false."""
    recipe: str | None = None
    """Recipe that supplies the defaults, as `name@version` from `GET /v1/recipes`. If absent, chosen by model and adapter."""
    training_files: list[MixedFile] | None = None
    """Several files to train on instead of `training_file`, 1 to 16 and each once, with a `weight` or `tokens`; an epoch reads each once if
    none has either. Methods `supervised` and `cpt` only."""
    hardware: JsonObject | None = None
    """Hardware to use: `num_gpus` (1, 2, 4, 8, 16 or 32), `strategy` (`single`, `ddp`, `fsdp2`, `zero1`, `zero2` or `zero3`) and
    `context_parallel` (1, 2, 4 or 8 GPUs that share each window). What is left out follows from the memory estimate."""
    adapter: str | None = None
    """What to train: `lora` (default), `qlora` (LoRA on a quantized base) or `full` (all parameters)."""
    auto_promote: bool | None = None
    """Whether to promote the adapter to production as soon as it passes its evaluation. Default: true; of an experiment false."""
    warm_start: str | None = None
    """Adapter (id or model name), job or checkpoint of yours whose weights training starts from. If absent, adapters start from scratch."""
    force: bool | None = None
    """Train even if an earlier job of yours already trained the same thing, or if an identical request arrived within the last minute.
    Default: false."""
    idempotency_key: str | None = None
    """Same as the `Idempotency-Key` header: resending a request with the same key returns the existing job instead of creating another. 1
    to 255 characters, remembered for 30 days."""


class JobError(ApiModel):
    """Why something failed or was refused."""

    code: str
    """Stable, machine-readable error code, documented in docs/errors.md."""
    message: str
    """Human-readable explanation, with the next step if there is one."""
    param: str | None
    """Name of the request field that caused the error; null if no single field did."""


class WarmStart(ApiModel):
    """The adapter or checkpoint whose weights a job's training starts from."""

    adapter: str
    """Name of the adapter or checkpoint, for display."""
    adapter_id: str | None = None
    """Id of the adapter; null if training starts from a checkpoint."""
    checkpoint_id: str | None = None
    """Id of the checkpoint; null if training starts from an adapter."""
    manifest_sha256: str
    """SHA-256 of the manifest of the files that were loaded."""


class EvaluationProgress(ApiModel):
    """Progress of the evaluation that follows training."""

    phase: str | None
    """Current phase: `setup`, `loading`, `capability`, `answering`, `proof`, `classifying`, `judging` or `done`. Null if not reported
    yet."""
    subject: str | None
    """Model being evaluated right now: `base`, `adapter` or `previous` (the last accepted adapter). Null between phases."""
    suite: str | None
    """Suite being run right now; null between suites."""
    done: int | None
    """Requests answered so far, over all models and suites."""
    total: int | None
    """Requests to answer in total; null until known."""
    eta_s: float | None
    """Estimated seconds until the evaluation finishes, at the current rate; null until it can be estimated."""


class Job(ApiModel):
    """A fine-tuning job.

    OpenAI's fields come first; the fields after `error` are extensions of this platform.
    """

    id: str
    """Id of the job, starting with `ftjob-`."""
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    """Object type, always `fine_tuning.job`."""
    created_at: EpochSeconds
    """When the job was submitted, as Unix time in seconds."""
    finished_at: EpochSeconds | None
    """When the job succeeded, failed or was cancelled, as Unix time in seconds; null until then."""
    estimated_finish: EpochSeconds | None
    """When the job is expected to have its result, evaluation included, as Unix time in seconds; null if it cannot be estimated yet or
    the job has ended."""
    model: str
    """Id of the base model."""
    fine_tuned_model: str | None
    """Name of the resulting model, to pass as `model` in requests; null unless the job succeeded and the model is approved."""
    organization_id: str
    """Id of the tenant that owns the job."""
    status: str
    """Status in OpenAI's terms: `validating_files`, `queued`, `running`, `pausing`, `paused`, `succeeded`, `failed` or `cancelled`. See
    `state` for more detail."""
    training_file: str
    """Id of the training file; of a mixture, the first one."""
    validation_file: str | None
    """Id of the validation file; null if none was given."""
    result_files: list[str]
    """Ids of the result files: one CSV with the metrics of every step, once the job has succeeded. Empty before."""
    trained_tokens: int | None
    """Tokens trained on, over all epochs; null until training finishes."""
    seed: int
    """Seed used for training: the one requested, or the one that was drawn."""
    hyperparameters: JsonObject
    """Hyperparameters as requested, with `"auto"` for those left open. Once the data is prepared, `"auto"` is replaced by the values in
    use."""
    method: JsonObject
    """Training method as `{"type": ..., "<type>": {"hyperparameters": {...}}}`."""
    integrations: list[JsonObject] | None
    """Integrations as requested: null or empty, since none are supported."""
    metadata: dict[str, str] | None
    """Your key-value pairs from the submission; null if none were given."""
    error: JobError | None
    """Why the job failed; null unless `status` is `failed`."""
    state: str
    """State in this platform's terms: `validating`, `queued`, `provisioning`, `running`, `evaluating`, `pausing`, `paused`, `preempted`,
    `succeeded`, `failed`, `cancelled`, or `dead_letter`, if it was given up after repeated failures of the platform."""
    checkpointing: bool
    """Whether the job is writing a checkpoint right now."""
    queue_position: int | None
    """Position in the queue, starting at 1; null if the job is not queued or no scheduling cycle has seen it yet."""
    reason: str | None
    """Code for why the job is waiting or paused, such as `WaitingForQuota`; null if it is doing neither or the reason is not known yet."""
    reason_detail: str | None
    """Human-readable explanation of `reason`; null if `reason` is null."""
    ahead: Ahead | None
    """Jobs ahead of this one in the queue, as counts; null unless it is waiting."""
    reservation: Reservation | None
    """GPUs reserved for this job at a later time; null if it is not waiting or has no reservation."""
    due_at: EpochSeconds | None
    """For a waiting job, the Unix time in seconds after which no later job of its tier is started before it; null if not waiting or not
    determined yet."""
    preemptions: int
    """Times the job was preempted: it saved a checkpoint, gave up its GPUs and was queued again."""
    queued_at: EpochSeconds | None
    """When the job last entered the queue, as Unix time in seconds; null if it never did."""
    started_at: EpochSeconds | None
    """When training first started, as Unix time in seconds; null until then."""
    estimated_start: EpochSeconds | None
    """For a waiting job, its expected start as Unix time in seconds; null if not waiting or if no start can be foreseen."""
    step: int | None
    """Last training step reported; null before the first."""
    total_steps: int | None
    """Training steps in total; null until known."""
    loss: float | None
    """Training loss at the last reported step; null before the first."""
    tokens_per_s: float | None
    """Training throughput in tokens per second, over all GPUs; null before the first step."""
    evaluation: EvaluationProgress | None
    """Progress of the evaluation; null unless `state` is `evaluating`."""
    cost_micros: int
    """Cost so far, in micro-dollars (1,000,000 = 1 US dollar): the sum of the job's ledger entries, and what its running attempt would cost
    if it ended now."""
    unbilled_micros: int
    """Part of `cost_micros` that is not billed yet, in micro-dollars: an attempt is billed when it ends. 0 if no attempt is running."""
    attempt: int
    """Number of the current or last training attempt; 0 before the first."""
    suffix: str | None
    """Suffix requested for the model's name; null if none."""
    tier: str
    """Tier the job runs in: `free`, `standard` or `premium`."""
    promised_start: EpochSeconds | None
    """Latest start that the tier promises, as Unix time in seconds; null if the tier promises none."""
    sla_missed: bool
    """Whether the promised start was missed. A job you pause or cancel before it starts never counts as missed."""
    spot: bool
    """Whether the submission allowed spot GPUs."""
    training_files: list[JobFile] | None
    """Files of a mixture, as requested; null for a single training file."""
    recipe: str | None
    """Recipe that supplies the defaults, as `name@version`: the one that was chosen when the job was submitted."""
    auto_promote: bool
    """Whether the adapter is promoted to production once it passes its evaluation."""
    adapter: str
    """What is trained: `lora`, `qlora` or `full`."""
    hardware: JsonObject | None
    """Hardware as `num_gpus`, `strategy` and, above 1, `context_parallel`: as planned once the data is prepared, before that as requested.
    Null if nothing was requested."""
    eval_config: JsonObject | None
    """Evaluation settings as requested; null if none were given."""
    base_digest: str
    """SHA-256 digest of the base model's weights, tokenizer, chat template and config at submission."""
    dataset_id: str | None
    """Id of the immutable dataset version trained on, of a mixture the first one; null until the training file is validated and pinned."""
    spec_sha256: str | None
    """SHA-256 of the frozen training spec; null until the data is prepared."""
    adapter_id: str | None
    """Id of the resulting adapter; null until it is registered. Set even if the adapter failed its evaluation."""
    warm_start: WarmStart | None
    """Adapter or checkpoint that training starts from; null if none."""
    api_key_id: str | None
    """Id of the API key that submitted the job, or its sweep; null if it was submitted in the console without a key."""
    sweep_id: str | None
    """Id of the sweep that submitted this job; null if none did."""
    reused: bool
    """Whether the result comes from an earlier job that trained the same thing, so that nothing was trained or billed."""
    reused_job_id: str | None
    """Id of the earlier job whose result is reused; null unless that is a different job."""
    report_url: str
    """Path of the validation report of the training data."""
    trace_id: str | None
    """OpenTelemetry trace id of the job; null if tracing is off."""
    quota: JobQuota | None = None
    """Effect of the job on this month's GPU-hours. Present only in the response to a submission; null otherwise."""


class Event(ApiModel):
    """Something that happened to a job: a state change, a measured step or a warning."""

    id: str
    """Id of the event; pass it as `after` to page."""
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    """Object type, always `fine_tuning.job.event`."""
    created_at: EpochSeconds
    """When it happened, as Unix time in seconds."""
    level: str
    """Severity: `info`, `warn` or `error`."""
    type: str
    """`metrics` for measurements of a training step, `message` for everything else."""
    code: str | None
    """Stable event code, documented in docs/errors.md; null if the event has none."""
    message: str
    """Human-readable description of the event."""
    data: JsonObject | None
    """Details by name. For `metrics` events: `step`, `total_steps`, `train_loss`, `valid_loss` and others. Null if there are none."""


class EstimatedTokens(ApiModel):
    """Tokens of the training data, counted or estimated."""

    per_epoch: int
    """Training tokens in one epoch, after truncation."""
    error: int
    """Half-width of the 95% confidence interval of `per_epoch`, in tokens; 0 if the tokens were counted."""
    counted: bool
    """Whether all tokens were counted, rather than extrapolated from a sample."""
    how: str
    """How the number was obtained, in words."""
    total: int
    """Training tokens over all epochs."""


class EstimatedResult(ApiModel):
    """The model that a job would make, and whether vLLM can serve it."""

    type: Literal["lora_adapter", "full_model"]
    """Kind of model."""
    rank: int | None
    """Rank of the finished adapter, twice the trained one with PiSSA; null for `full_model`."""
    serving: Literal["shared_server", "own_server", "none"]
    """`shared_server`: beside other adapters of its base; `own_server`: alone, on GPUs of its own; `none`: only after an export."""
    detail: str
    """The same in words, with the next step."""


class EstimatedFile(ApiModel):
    """How much of a mixture's file an epoch would read."""

    file: str
    """Id of the file."""
    dataset_id: str
    """Id of the dataset version made from it."""
    repeats: float
    """Times that an epoch reads it: 0.5 is half of its rows, 2 each of them twice."""
    tokens: int
    """Tokens of it that an epoch reads."""


class Estimate(ApiModel):
    """Estimated resources, duration and cost of a job, without submitting it."""

    object: Literal["fine_tuning.estimate"] = "fine_tuning.estimate"
    """Object type, always `fine_tuning.estimate`."""
    model: str
    """Id of the base model."""
    training_file: str
    """Id of the training file; of a mixture, the first one."""
    training_files: list[EstimatedFile] | None
    """Files of a mixture; null for a single training file."""
    dataset_id: str
    """Id of the dataset version made from the training file; of a mixture, from the first one."""
    num_examples: int
    """Examples to train on, after part of the data is held out for validation."""
    max_seq_len: int
    """Sequence length in tokens; longer examples are truncated, split or dropped as the file's policies say."""
    n_epochs: float
    """Passes over the training data."""
    tokens: EstimatedTokens
    """Tokens of the training data."""
    total_steps: int
    """Optimizer steps in total."""
    num_gpus: int
    """GPUs the job would use."""
    gpu_type: str
    """GPU type of the pool the job would probably run in."""
    tier: str
    """Tier the job would run in: `free`, `standard` or `premium`."""
    gpu_hours: float
    """Expected GPU-hours: training time multiplied by `num_gpus`."""
    price_micros: int
    """Expected price in micro-dollars (1,000,000 = 1 US dollar)."""
    seconds_to_start: float | None
    """Expected wait in the queue, in seconds; null if no start can be foreseen."""
    seconds_to_finish: float | None
    """Seconds until training and evaluation would finish, wait included; null if no start can be foreseen."""
    estimated_start: EpochSeconds | None
    """Expected start as Unix time in seconds; null if no start can be foreseen."""
    estimated_finish: EpochSeconds | None
    """Expected finish, evaluation included, as Unix time in seconds; null if no start can be foreseen."""
    starts_within_s: float | None
    """Seconds from submission within which the tier promises a start; null if it promises none."""
    quota: JobQuota
    """Effect the job would have on this month's GPU-hours."""
    recipe: str
    """Recipe that supplies the defaults, as `name@version`."""
    result: EstimatedResult
    """The model that the job would make."""
    memory: JsonObject
    """Memory estimate per GPU: `per_gpu_bytes`, its `parts`, the GPU's own `gpu_bytes`, and the placement it leads to."""
    assumptions: list[str]
    """Assumptions behind the numbers, one sentence each."""


class Checkpoint(ApiModel):
    """A checkpoint saved during training."""

    id: str
    """Id of the checkpoint, starting with `ftckpt_`."""
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    """Object type, always `fine_tuning.job.checkpoint`."""
    created_at: EpochSeconds
    """When the checkpoint was committed, as Unix time in seconds."""
    fine_tuned_model_checkpoint: str
    """Name of the checkpoint, `<job id>:step-<step>`: usable as `warm_start` or `model` of a new job."""
    fine_tuning_job_id: str
    """Id of the job that saved it."""
    step_number: int
    """Training step at which it was saved."""
    metrics: JsonObject
    """Metrics at that step, such as `step`, `train_loss` and `full_valid_loss`."""
    final: bool
    """Whether this is the checkpoint at the end of training."""
