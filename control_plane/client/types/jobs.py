# Written by `python -m tools.client` from the API's OpenAPI document: change that, and run it again.
"""Objects of the API: jobs."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from control_plane.client.types.queue import Ahead, Reservation
from control_plane.client.types.quotas import JobQuota


class AdapterLimits(TypedDict):
    """Limits of one kind of adapter on a base model."""

    name: str
    """Kind of adapter: `lora`, `qlora` or `full`."""
    ranks: list[int]
    """LoRA ranks that can be trained and served; empty for `full`."""
    tiers: list[str]
    """Tiers whose jobs may train it."""
    defaults: DefaultFit
    """What a job with the defaults would use."""


class Checkpoint(TypedDict):
    """A checkpoint saved during training."""

    id: str
    """Id of the checkpoint, starting with `ftckpt_`."""
    object: NotRequired[Literal["fine_tuning.job.checkpoint"]]
    """Object type, always `fine_tuning.job.checkpoint`."""
    created_at: int
    """When the checkpoint was committed, as Unix time in seconds."""
    fine_tuned_model_checkpoint: str
    """Name of the checkpoint, `<job id>:step-<step>`: usable as `warm_start` or `model` of a new job."""
    fine_tuning_job_id: str
    """Id of the job that saved it."""
    step_number: int
    """Training step at which it was saved."""
    metrics: dict[str, Any]
    """Metrics at that step, such as `step`, `train_loss` and `full_valid_loss`."""
    final: bool
    """Whether this is the checkpoint at the end of training."""


class ComparedJob(TypedDict):
    """One job in a comparison."""

    id: str
    """Id of the job."""
    status: str
    """Status in OpenAI's terms, as in the job itself."""
    fine_tuned_model: str | None
    """Name of the resulting model; null unless the job succeeded."""
    hyperparameters: dict[str, Any]
    """All hyperparameters in use; before the training spec is frozen, those requested."""
    final_loss: float | None
    """Final or last reported training loss; null if none was reported."""
    eval_loss: float | None
    """Final or last reported validation loss; null if none was reported."""
    eval_metrics: dict[str, float]
    """Scores of the evaluation report as `<suite>/<metric>`; the base model's are under `base/`."""
    trained_tokens: int | None
    """Tokens trained on; null until training finishes."""
    cost_micros: int
    """Cost billed so far, in micro-dollars."""
    duration_s: float | None
    """Seconds from first start to end (or until now), time in the queue between attempts included; null if it never started."""


class CreateJob(TypedDict):
    """A fine-tuning job to submit. OpenAI's fields come first; the fields after `hyperparameters` are extensions of this platform,
    which the OpenAI client sends with `extra_body`. Names used by other services are accepted too: `base_model` for `model`, and
    `lora_rank`, `lora_alpha` and `lora_target_modules` (at the top level or in `hyperparameters`) for `rank`, `alpha` and
    `target_modules`."""

    model: str
    """Id of the base model to fine-tune, as listed by `GET /v1/models`. One of your own adapters, jobs or checkpoints also works:
    training then continues from its weights, as with `warm_start`."""
    training_file: str
    """Id of an uploaded file with purpose `fine-tune`. It may still be validating; a file that failed validation is refused."""
    validation_file: NotRequired[str | None]
    """Id of a second uploaded file, used to measure validation loss. If absent, the rows marked as its own validation split are
    used, or else 2 to 10% of the training file is held out."""
    suffix: NotRequired[str | None]
    """Text that becomes part of the fine-tuned model's name: at most 64 letters, digits, `-`, `_` and `.`, starting with a letter
    or digit."""
    seed: NotRequired[int | None]
    """Seed for data order and weight initialization, 0 to 2147483647. A random seed is drawn if absent."""
    metadata: NotRequired[dict[str, str] | None]
    """Up to 16 key-value pairs of your own, returned with the job and usable as a filter. Keys have at most 64 characters, values
    at most 512."""
    integrations: NotRequired[list[dict[str, Any]] | None]
    """Must be null or empty: no third-party integrations are supported."""
    method: NotRequired[str | dict[str, Any] | None]
    """Training method, as an object such as `{"type": "dpo", "dpo": {"hyperparameters": {...}}}` or as one word: `supervised` (or
    `sft`), `dpo`, `orpo`, `kto`, `simpo` or `cpt`. `lora`, `qlora` and `full` mean supervised fine-tuning with that kind of
    adapter. Default: `supervised`."""
    hyperparameters: NotRequired[dict[str, Any] | None]
    """Hyperparameters by name; each may be `"auto"`. Deprecated by OpenAI in favor of `method` but still accepted; set them in one
    place only. `GET /v1/fine_tuning/model_limits` lists names and bounds."""
    eval_config: NotRequired[dict[str, Any] | None]
    """Settings of the evaluation that follows training: suites, thresholds, `mode`, `approval`. Keys left out take their defaults;
    unknown keys are refused."""
    tier: NotRequired[str | None]
    """Tier to run the job in: `free`, `standard` or `premium`, no higher than your tenant's own tier, which is the default."""
    spot: NotRequired[bool | None]
    """Allow the job to run on cheaper spot GPUs that can be taken away. Takes effect only outside the premium tier and for jobs
    expected to run at least 4 hours. Default: false."""
    recipe: NotRequired[str | None]
    """Recipe that supplies the defaults, as `name@version` from `GET /v1/recipes`. If absent, chosen by model and adapter."""
    hardware: NotRequired[dict[str, Any] | None]
    """Hardware to use: `num_gpus` (1, 2, 4, 8, 16 or 32) and `strategy` (`single`, `ddp`, `fsdp2`, `zero1`, `zero2` or `zero3`).
    What is left out follows from the memory estimate."""
    adapter: NotRequired[str | None]
    """What to train: `lora` (default), `qlora` (LoRA on a quantized base) or `full` (all parameters)."""
    auto_promote: NotRequired[bool | None]
    """Whether to promote the adapter to production as soon as it passes its evaluation. Default: true."""
    warm_start: NotRequired[str | None]
    """Adapter (id or model name), job or checkpoint of yours whose weights training starts from. If absent, adapters start from
    scratch."""
    force: NotRequired[bool | None]
    """Train even if an earlier job of yours already trained the same thing, or if an identical request arrived within the last
    minute. Default: false."""
    idempotency_key: NotRequired[str | None]
    """Same as the `Idempotency-Key` header: resending a request with the same key returns the existing job instead of creating
    another. 1 to 255 characters, remembered for 30 days."""


class CreateSweep(TypedDict):
    """A sweep to run: the body of a job plus the hyperparameters to vary. Its adapters are not promoted automatically unless
    `auto_promote` is true."""

    model: str
    """Id of the base model to fine-tune, as listed by `GET /v1/models`. One of your own adapters, jobs or checkpoints also works:
    training then continues from its weights, as with `warm_start`."""
    training_file: str
    """Id of an uploaded file with purpose `fine-tune`. It may still be validating; a file that failed validation is refused."""
    validation_file: NotRequired[str | None]
    """Id of a second uploaded file, used to measure validation loss. If absent, the rows marked as its own validation split are
    used, or else 2 to 10% of the training file is held out."""
    suffix: NotRequired[str | None]
    """Text that becomes part of the fine-tuned model's name: at most 64 letters, digits, `-`, `_` and `.`, starting with a letter
    or digit."""
    seed: NotRequired[int | None]
    """Seed for data order and weight initialization, 0 to 2147483647. A random seed is drawn if absent."""
    metadata: NotRequired[dict[str, str] | None]
    """Up to 16 key-value pairs of your own, returned with the job and usable as a filter. Keys have at most 64 characters, values
    at most 512."""
    integrations: NotRequired[list[dict[str, Any]] | None]
    """Must be null or empty: no third-party integrations are supported."""
    method: NotRequired[str | dict[str, Any] | None]
    """Training method, as an object such as `{"type": "dpo", "dpo": {"hyperparameters": {...}}}` or as one word: `supervised` (or
    `sft`), `dpo`, `orpo`, `kto`, `simpo` or `cpt`. `lora`, `qlora` and `full` mean supervised fine-tuning with that kind of
    adapter. Default: `supervised`."""
    hyperparameters: NotRequired[dict[str, Any] | None]
    """Hyperparameters by name; each may be `"auto"`. Deprecated by OpenAI in favor of `method` but still accepted; set them in one
    place only. `GET /v1/fine_tuning/model_limits` lists names and bounds."""
    eval_config: NotRequired[dict[str, Any] | None]
    """Settings of the evaluation that follows training: suites, thresholds, `mode`, `approval`. Keys left out take their defaults;
    unknown keys are refused."""
    tier: NotRequired[str | None]
    """Tier to run the job in: `free`, `standard` or `premium`, no higher than your tenant's own tier, which is the default."""
    spot: NotRequired[bool | None]
    """Allow the job to run on cheaper spot GPUs that can be taken away. Takes effect only outside the premium tier and for jobs
    expected to run at least 4 hours. Default: false."""
    recipe: NotRequired[str | None]
    """Recipe that supplies the defaults, as `name@version` from `GET /v1/recipes`. If absent, chosen by model and adapter."""
    hardware: NotRequired[dict[str, Any] | None]
    """Hardware to use: `num_gpus` (1, 2, 4, 8, 16 or 32) and `strategy` (`single`, `ddp`, `fsdp2`, `zero1`, `zero2` or `zero3`).
    What is left out follows from the memory estimate."""
    adapter: NotRequired[str | None]
    """What to train: `lora` (default), `qlora` (LoRA on a quantized base) or `full` (all parameters)."""
    auto_promote: NotRequired[bool | None]
    """Whether to promote the adapter to production as soon as it passes its evaluation. Default: true."""
    warm_start: NotRequired[str | None]
    """Adapter (id or model name), job or checkpoint of yours whose weights training starts from. If absent, adapters start from
    scratch."""
    force: NotRequired[bool | None]
    """Train even if an earlier job of yours already trained the same thing, or if an identical request arrived within the last
    minute. Default: false."""
    idempotency_key: NotRequired[str | None]
    """Same as the `Idempotency-Key` header: resending a request with the same key returns the existing job instead of creating
    another. 1 to 255 characters, remembered for 30 days."""
    sweep: SweepSettings
    """The hyperparameters to vary, and the metric that ranks the trials."""


class DefaultFit(TypedDict):
    """Resources that a supervised job with its recipe's defaults would use, according to the memory estimate made at submission."""

    num_gpus: int | None
    """GPUs needed; null if the job would be refused."""
    strategy: str | None
    """How the GPUs share the model: `single`, `ddp`, `fsdp2`, `zero1`, `zero2` or `zero3`; null if the job would be refused."""
    per_device_batch_size: int | None
    """Rows that each GPU processes at a time; null if the job would be refused."""
    max_seq_len: int | None
    """Sequence length in tokens; null if the job would be refused."""
    refused: JobError | None
    """Why a job with the defaults would be refused; null if it would be accepted."""


class Estimate(TypedDict):
    """Estimated resources, duration and cost of a job, without submitting it."""

    object: NotRequired[Literal["fine_tuning.estimate"]]
    """Object type, always `fine_tuning.estimate`."""
    model: str
    """Id of the base model."""
    training_file: str
    """Id of the training file."""
    dataset_id: str
    """Id of the dataset version made from the training file."""
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
    """Seconds until training would finish, wait included; null if no start can be foreseen."""
    estimated_start: int | None
    """Expected start as Unix time in seconds; null if no start can be foreseen."""
    estimated_finish: int | None
    """Expected finish of training as Unix time in seconds; null if no start can be foreseen."""
    starts_within_s: float | None
    """Seconds from submission within which the tier promises a start; null if it promises none."""
    quota: JobQuota
    """Effect the job would have on this month's GPU-hours."""
    recipe: str
    """Recipe that supplies the defaults, as `name@version`."""
    memory: dict[str, Any]
    """Memory estimate per GPU: `per_gpu_bytes`, its `parts`, the GPU's own `gpu_bytes`, and the placement it leads to."""
    assumptions: list[str]
    """Assumptions behind the numbers, one sentence each."""


class EstimatedTokens(TypedDict):
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


class EvaluationProgress(TypedDict):
    """Progress of the evaluation that follows training."""

    phase: str | None
    """Current phase: `setup`, `loading`, `capability`, `answering`, `proof`, `classifying`, `judging` or `done`. Null if not
    reported yet."""
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


class Event(TypedDict):
    """Something that happened to a job: a state change, a measured step or a warning."""

    id: str
    """Id of the event; pass it as `after` to page."""
    object: NotRequired[Literal["fine_tuning.job.event"]]
    """Object type, always `fine_tuning.job.event`."""
    created_at: int
    """When it happened, as Unix time in seconds."""
    level: str
    """Severity: `info`, `warn` or `error`."""
    type: str
    """`metrics` for measurements of a training step, `message` for everything else."""
    code: str | None
    """Stable event code, documented in docs/errors.md; null if the event has none."""
    message: str
    """Human-readable description of the event."""
    data: dict[str, Any] | None
    """Details by name. For `metrics` events: `step`, `total_steps`, `train_loss`, `valid_loss` and others. Null if there are none."""


class Job(TypedDict):
    """A fine-tuning job. OpenAI's fields come first; the fields after `error` are extensions of this platform."""

    id: str
    """Id of the job, starting with `ftjob-`."""
    object: NotRequired[Literal["fine_tuning.job"]]
    """Object type, always `fine_tuning.job`."""
    created_at: int
    """When the job was submitted, as Unix time in seconds."""
    finished_at: int | None
    """When the job succeeded, failed or was cancelled, as Unix time in seconds; null until then."""
    estimated_finish: int | None
    """When training is expected to finish, as Unix time in seconds; null if it cannot be estimated yet or the job has ended."""
    model: str
    """Id of the base model."""
    fine_tuned_model: str | None
    """Name of the resulting model, to pass as `model` in requests; null unless the job succeeded."""
    organization_id: str
    """Id of the tenant that owns the job."""
    status: str
    """Status in OpenAI's terms: `validating_files`, `queued`, `running`, `pausing`, `paused`, `succeeded`, `failed` or `cancelled`.
    See `state` for more detail."""
    training_file: str
    """Id of the training file."""
    validation_file: str | None
    """Id of the validation file; null if none was given."""
    result_files: list[str]
    """Ids of the result files: one CSV with the metrics of every step, once the job has succeeded. Empty before."""
    trained_tokens: int | None
    """Tokens trained on, over all epochs; null until training finishes."""
    seed: int
    """Seed used for training: the one requested, or the one that was drawn."""
    hyperparameters: dict[str, Any]
    """Hyperparameters as requested, with `"auto"` for those left open. Once the data is prepared, `"auto"` is replaced by the
    values in use."""
    method: dict[str, Any]
    """Training method as `{"type": ..., "<type>": {"hyperparameters": {...}}}`."""
    integrations: list[dict[str, Any]] | None
    """Integrations as requested: null or empty, since none are supported."""
    metadata: dict[str, str] | None
    """Your key-value pairs from the submission; null if none were given."""
    error: JobError | None
    """Why the job failed; null unless `status` is `failed`."""
    state: str
    """State in this platform's terms: `validating`, `queued`, `provisioning`, `running`, `evaluating`, `pausing`, `paused`,
    `preempted`, `succeeded`, `failed` or `cancelled`."""
    checkpointing: bool
    """Whether the job is writing a checkpoint right now."""
    queue_position: int | None
    """Position in the queue, starting at 1; null if the job is not queued or no scheduling cycle has seen it yet."""
    reason: str | None
    """Code for why the job is waiting or paused, such as `WaitingForQuota`; null if it is doing neither or the reason is not known
    yet."""
    reason_detail: str | None
    """Human-readable explanation of `reason`; null if `reason` is null."""
    ahead: Ahead | None
    """Jobs ahead of this one in the queue, as counts; null unless it is waiting."""
    reservation: Reservation | None
    """GPUs reserved for this job at a later time; null if it is not waiting or has no reservation."""
    due_at: int | None
    """For a waiting job, the Unix time in seconds after which no later job of its tier is started before it; null if not waiting or
    not determined yet."""
    preemptions: int
    """Times the job was preempted: it saved a checkpoint, gave up its GPUs and was queued again."""
    queued_at: int | None
    """When the job last entered the queue, as Unix time in seconds; null if it never did."""
    started_at: int | None
    """When training first started, as Unix time in seconds; null until then."""
    estimated_start: int | None
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
    """Cost billed so far, in micro-dollars (1,000,000 = 1 US dollar): the sum of the job's ledger entries. An attempt is billed
    when it ends."""
    attempt: int
    """Number of the current or last training attempt; 0 before the first."""
    suffix: str | None
    """Suffix requested for the model's name; null if none."""
    tier: str
    """Tier the job runs in: `free`, `standard` or `premium`."""
    promised_start: int | None
    """Latest start that the tier promises, as Unix time in seconds; null if the tier promises none."""
    sla_missed: bool
    """Whether the promised start was missed. A job you pause or cancel before it starts never counts as missed."""
    spot: bool
    """Whether the submission allowed spot GPUs."""
    recipe: str | None
    """Recipe that supplied the defaults, as `name@version`; null if none was requested and the data is not prepared yet."""
    auto_promote: bool
    """Whether the adapter is promoted to production once it passes its evaluation."""
    adapter: str
    """What is trained: `lora`, `qlora` or `full`."""
    hardware: dict[str, Any] | None
    """Hardware as `num_gpus` and `strategy`: as planned once the data is prepared, before that as requested. Null if nothing was
    requested."""
    eval_config: dict[str, Any] | None
    """Evaluation settings as requested; null if none were given."""
    base_digest: str
    """SHA-256 digest of the base model's weights, tokenizer, chat template and config at submission."""
    dataset_id: str | None
    """Id of the immutable dataset version trained on; null until the training file is validated and pinned."""
    spec_sha256: str | None
    """SHA-256 of the frozen training spec; null until the data is prepared."""
    adapter_id: str | None
    """Id of the resulting adapter; null until it is registered. Set even if the adapter failed its evaluation."""
    warm_start: WarmStart | None
    """Adapter or checkpoint that training starts from; null if none."""
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
    quota: NotRequired[JobQuota | None]
    """Effect of the job on this month's GPU-hours. Present only in the response to a submission; null otherwise."""


class JobComparison(TypedDict):
    """Jobs side by side."""

    object: NotRequired[Literal["fine_tuning.comparison"]]
    """Object type, always `fine_tuning.comparison`."""
    differing: dict[str, list[Any]]
    """Hyperparameters that are not the same in all jobs, each with its values in the order of `jobs`."""
    jobs: list[ComparedJob]
    """The jobs, in the order requested."""


class JobError(TypedDict):
    """Why something failed or was refused."""

    code: str
    """Stable, machine-readable error code, documented in docs/errors.md."""
    message: str
    """Human-readable explanation, with the next step if there is one."""
    param: str | None
    """Name of the request field that caused the error; null if no single field did."""


class MethodLimits(TypedDict):
    """A training method and the hyperparameters specific to it."""

    name: str
    """Name of the method, to pass as `method` of a job."""
    rows: list[str]
    """Kinds of dataset rows it trains on: `chat`, `preference`, `kto` or `text`."""
    hyperparameters: dict[str, ValueLimit]
    """Hyperparameters specific to this method, by name."""


class ModelLimits(TypedDict):
    """Limits for jobs on a base model."""

    object: NotRequired[Literal["fine_tuning.model_limits"]]
    """Object type, always `fine_tuning.model_limits`."""
    model: str
    """Id of the base model."""
    accepts_jobs: bool
    """Whether new jobs on this model are accepted."""
    unavailable: str | None
    """Why the model accepts no jobs; null if it does."""
    context_length: int | None
    """Longest sequence the model accepts, in tokens; null if its files are unavailable."""
    num_parameters: int | None
    """Number of parameters; null if the model's files are unavailable."""
    methods: list[MethodLimits]
    """Training methods, each with the hyperparameters specific to it."""
    adapters: list[AdapterLimits]
    """Kinds of adapters; empty if the model's files are unavailable."""
    hyperparameters: dict[str, ValueLimit]
    """Hyperparameters common to all methods, by name."""
    num_gpus: list[int]
    """GPU counts that a job may request on this platform."""
    strategies: list[str]
    """Values that `hardware.strategy` may take."""
    max_suffix_length: int
    """Maximum length of a job's `suffix`, in characters."""
    max_seed: int
    """Largest `seed` of a job; the smallest is 0."""
    max_metadata_pairs: int
    """Maximum number of `metadata` pairs of a job."""


class PreviewRequest(TypedDict):
    """Which examples to preview."""

    model: str
    """Id of the base model whose chat template and tokenizer are used."""
    training_file: str
    """Id of a validated file or of a dataset version."""
    num_examples: NotRequired[int]
    """Examples to return, 1 to 100."""
    max_seq_len: NotRequired[int | None]
    """Sequence length in tokens to truncate at, at most the model's context length, which is the default."""


class Recipe(TypedDict):
    """Defaults for jobs with one kind of adapter on base models of a certain family or size."""

    id: str
    """Id of the recipe, `name@version`, which a job takes as `recipe`."""
    object: NotRequired[Literal["recipe"]]
    """Object type, always `recipe`."""
    name: str
    """Name of the recipe, without its version."""
    version: int
    """Version of the recipe."""
    adapter: str
    """Kind of adapter it applies to: `lora`, `qlora` or `full`."""
    method: str
    """Training method whose defaults are shown."""
    summary: str
    """What the recipe is for, in a sentence."""
    base_models: list[str]
    """Patterns of the base model ids it applies to; empty if it applies to all."""
    min_parameters: int
    """Minimum number of parameters of base models it applies to."""
    max_parameters: int | None
    """Number of parameters that base models must stay below; null if there is no limit."""
    defaults: dict[str, RecipeDefault]
    """Defaults by hyperparameter, each with its source."""


class RecipeDefault(TypedDict):
    """The default of one hyperparameter."""

    value: Any
    """The default value."""
    source: str
    """Where the value comes from, such as a paper or a measurement."""


class Sweep(TypedDict):
    """A search over hyperparameters: one job per combination."""

    id: str
    """Id of the sweep."""
    object: NotRequired[Literal["fine_tuning.sweep"]]
    """Object type, always `fine_tuning.sweep`."""
    created_at: int
    """When the sweep was created, as Unix time in seconds."""
    cancelled_at: int | None
    """When the sweep was cancelled, as Unix time in seconds; null otherwise."""
    status: str
    """`running`, `succeeded` (at least one trial did), `failed` or `cancelled`."""
    model: str
    """Base model of all trials, as requested."""
    training_file: str
    """Id of the training file of all trials."""
    strategy: str
    """`grid` or `random`."""
    parameters: dict[str, Any]
    """Hyperparameters that vary, as requested."""
    max_jobs: int
    """Maximum number of jobs the sweep submits."""
    seed: int
    """Seed for drawing combinations: the one requested, or the one that was drawn."""
    metric: str
    """Metric that ranks the trials."""
    goal: str
    """Whether the metric is to `minimize` or `maximize`."""
    trials: list[SweepTrial]
    """The trials, by number."""
    counts: SweepCounts
    """Number of trials by status."""
    waiting_reason: str | None
    """Why the next trial cannot be submitted yet, such as a reached limit; null if nothing is holding it back."""
    best: SweepTrial | None
    """Best trial among those that succeeded so far; null if none has, and always null in lists of sweeps."""
    cost_micros: int
    """Cost of all trials so far, in micro-dollars."""


class SweepCounts(TypedDict):
    """Trials of a sweep, counted by status."""

    total: int
    """All trials of the sweep."""
    waiting: int
    """Trials not submitted yet."""
    running: int
    """Trials whose job has not ended; queued and paused jobs count too."""
    succeeded: int
    """Trials whose job succeeded."""
    failed: int
    """Trials whose job failed, or that could not be submitted."""
    cancelled: int
    """Trials whose job was cancelled."""


class SweepSettings(TypedDict):
    """Which hyperparameters vary, and how trials are ranked."""

    strategy: NotRequired[str | None]
    """`grid` (default) tries every combination; `random` draws combinations."""
    parameters: dict[str, Any]
    """Hyperparameters to vary, each with a list of values. With `random` also a range such as `{"min": 1e-5, "max": 1e-3, "scale":
    "log"}`."""
    max_jobs: NotRequired[int | None]
    """Maximum number of jobs to submit, 1 to 100 (default 100). Required for `random`; a grid with more combinations is refused."""
    seed: NotRequired[int | None]
    """Seed for drawing combinations, and for training every trial unless the request has its own `seed`. Drawn at random if absent."""
    metric: NotRequired[str | None]
    """Metric that ranks the trials: `eval_loss` (default), `train_loss`, or `<suite>/<metric>` of the evaluation report."""
    goal: NotRequired[str | None]
    """`minimize` or `maximize`. Required unless the metric is a loss or a perplexity, which are minimized."""


class SweepTrial(TypedDict):
    """One combination of hyperparameters, and the job that tries it."""

    number: int
    """Number of the trial within the sweep, starting at 0."""
    parameters: dict[str, Any]
    """The hyperparameters that this trial varies, with their values."""
    status: str
    """`waiting` (not submitted yet), `refused` (could not be submitted), or the `status` of its job."""
    job_id: str | None
    """Id of its job; null until it is submitted."""
    reused: bool
    """Whether an earlier job had trained the same thing and its result is used."""
    fine_tuned_model: str | None
    """Name of the resulting model; null unless its job succeeded."""
    value: float | None
    """Value of the sweep's metric; null until measured, and always null in lists of sweeps."""
    cost_micros: int
    """Cost of its job so far, in micro-dollars; 0 if an earlier job's result is used."""
    error: JobError | None
    """Why the trial could not be submitted; null otherwise."""


class ValueLimit(TypedDict):
    """Values that a hyperparameter accepts."""

    type: str
    """Kind of value: `int`, `float`, `word` (one of `allowed`), `flag` (true or false) or `modules` (names of layers)."""
    minimum: float | None
    """Smallest number accepted; null if there is none or the value is not a number."""
    exclusive_minimum: bool
    """Whether `minimum` itself is refused."""
    maximum: float | None
    """Largest number accepted; null if there is none or the value is not a number."""
    allowed: list[int | str] | None
    """The only values accepted; null if not limited to a list."""
    text: str
    """The limit in words, as error messages state it."""
    because: str | None
    """Reason for the limit; null if it needs none."""


class WarmStart(TypedDict):
    """The adapter or checkpoint whose weights a job's training starts from."""

    adapter: str
    """Name of the adapter or checkpoint, for display."""
    adapter_id: NotRequired[str | None]
    """Id of the adapter; null if training starts from a checkpoint."""
    checkpoint_id: NotRequired[str | None]
    """Id of the checkpoint; null if training starts from an adapter."""
    manifest_sha256: str
    """SHA-256 of the manifest of the files that were loaded."""
