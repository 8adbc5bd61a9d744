# Written by `python -m tools.client` from the API's OpenAPI document: change that, and run it again.
"""Objects of the API: experiments."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from control_plane.client.types.jobs import JobError


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


class JobComparison(TypedDict):
    object: NotRequired[Literal["fine_tuning.comparison"]]
    differing: dict[str, list[Any]]
    """Hyperparameters that differ, with their values in the order of `jobs`."""
    jobs: list[ComparedJob]


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
