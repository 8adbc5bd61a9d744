"""Sweeps and comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import ConfigDict

from control_plane.http.schemas import ApiModel, EpochSeconds, JsonObject
from control_plane.jobs.schemas import CreateJob, JobError


class SweepSettings(ApiModel):
    """Which hyperparameters vary, and how trials are ranked."""

    model_config = ConfigDict(extra="allow", strict=True)  # unknown fields are refused by name, further in

    strategy: str | None = None
    """`grid` (default) tries every combination; `random` draws combinations."""
    parameters: JsonObject
    """Hyperparameters to vary, each with a list of values. With `random` also a range such as `{"min": 1e-5, "max": 1e-3, "scale":
    "log"}`."""
    max_jobs: int | None = None
    """Maximum number of jobs to submit, 1 to 100 (default 100). Required for `random`; a grid with more combinations is refused."""
    seed: int | None = None
    """Seed for drawing combinations, and for training every trial unless the request has its own `seed`. Drawn at random if absent."""
    metric: str | None = None
    """Metric that ranks the trials: `eval_loss` (default), `train_loss`, or `<suite>/<metric>` of the evaluation report."""
    goal: str | None = None
    """`minimize` or `maximize`. Required unless the metric is a loss or a perplexity, which are minimized."""


class CreateSweep(CreateJob):
    """A sweep to run: the body of a job plus the hyperparameters to vary. Its jobs are experiments unless `eval_config` has another `mode`,
    and their adapters are not promoted automatically unless `auto_promote` is true."""

    sweep: SweepSettings
    """The hyperparameters to vary, and the metric that ranks the trials."""


class SweepTrial(ApiModel):
    """One combination of hyperparameters, and the job that tries it."""

    number: int
    """Number of the trial within the sweep, starting at 0."""
    parameters: JsonObject
    """The hyperparameters that this trial varies, with their values."""
    status: str
    """`waiting` (not submitted yet), `refused` (could not be submitted), or the `status` of its job."""
    job_id: str | None
    """Id of its job; null until it is submitted."""
    reused: bool
    """Whether an earlier job had trained the same thing and its result is used."""
    fine_tuned_model: str | None
    """Name of the resulting model; null unless its job succeeded and the model is approved."""
    adapter_id: str | None
    """Id of the resulting adapter, which `POST /v1/adapters/{adapter_id}/promote` takes; null until its job has ended."""
    value: float | None
    """Value of the sweep's metric; null until measured, and always null in lists of sweeps."""
    cost_micros: int
    """Cost of its job so far, in micro-dollars; 0 if an earlier job's result is used."""
    error: JobError | None
    """Why the trial could not be submitted; null otherwise."""


class SweepCounts(ApiModel):
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


class Sweep(ApiModel):
    """A search over hyperparameters: one job per combination."""

    id: str
    """Id of the sweep."""
    object: Literal["fine_tuning.sweep"] = "fine_tuning.sweep"
    """Object type, always `fine_tuning.sweep`."""
    created_at: EpochSeconds
    """When the sweep was created, as Unix time in seconds."""
    cancelled_at: EpochSeconds | None
    """When the sweep was cancelled, as Unix time in seconds; null otherwise."""
    status: str
    """`running`, `succeeded` (at least one trial did), `failed` or `cancelled`."""
    model: str
    """Base model of all trials, as requested."""
    training_file: str
    """Id of the training file of all trials; of a mixture, the first one."""
    strategy: str
    """`grid` or `random`."""
    parameters: JsonObject
    """Hyperparameters that vary, as requested."""
    max_jobs: int
    """Maximum number of jobs the sweep submits."""
    seed: int
    """Seed for drawing combinations: the one requested, or the one that was drawn."""
    metric: str
    """Metric that ranks the trials."""
    goal: str
    """Whether the metric is to `minimize` or `maximize`."""
    trials: Sequence[SweepTrial]
    """The trials, by number."""
    counts: SweepCounts
    """Number of trials by status."""
    waiting_reason: str | None
    """Why the next trial cannot be submitted yet, such as a reached limit; null if nothing is holding it back."""
    best: SweepTrial | None
    """Best trial among those that succeeded so far; null if none has, and always null in lists of sweeps."""
    cost_micros: int
    """Cost of all trials so far, in micro-dollars."""


class ComparedJob(ApiModel):
    """One job in a comparison."""

    id: str
    """Id of the job."""
    status: str
    """Status in OpenAI's terms, as in the job itself."""
    fine_tuned_model: str | None
    """Name of the resulting model; null unless the job succeeded and the model is approved."""
    hyperparameters: JsonObject
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
    """Cost so far, in micro-dollars, its running attempt included."""
    duration_s: float | None
    """Seconds from first start to end (or until now), time in the queue between attempts included; null if it never started."""


class JobComparison(ApiModel):
    """Jobs side by side."""

    object: Literal["fine_tuning.comparison"] = "fine_tuning.comparison"
    """Object type, always `fine_tuning.comparison`."""
    differing: dict[str, list[Any]]
    """Hyperparameters that are not the same in all jobs, each with its values in the order of `jobs`."""
    jobs: Sequence[ComparedJob]
    """The jobs, in the order requested."""
