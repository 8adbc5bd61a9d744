"""Sweeps and comparisons over the wire: their shapes, and rows into them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from control_plane.jobs.schemas import CreateJob, JobError
from control_plane.jobs.sweeps.comparison import Compared, Comparison
from control_plane.jobs.sweeps.service import SweepView, TrialView
from control_plane.platform.epoch_time import epoch_seconds
from control_plane.platform.job_states import JobState, openai_status


class SweepSettings(BaseModel):
    """What varies, and what best means."""

    model_config = ConfigDict(extra="allow", strict=True)  # unknown fields are refused by name, further in

    strategy: str | None = Field(None, description="grid (if absent): every combination; or random.")
    parameters: dict[str, Any] = Field(
        description='Hyperparameters, each a list of values; for random also a range `{"min": 1e-5, "max": 1e-3, "scale": "log"}`.'
    )
    max_jobs: int | None = Field(None, description="At most so many jobs, up to 100; needed for random.")
    seed: int | None = Field(None, description="Of the draws, and of the training of all trials unless the body has a seed.")
    metric: str | None = Field(None, description="eval_loss (if absent), train_loss, or `<suite>/<metric>` of the eval report.")
    goal: str | None = Field(None, description="minimize or maximize; needed where the metric is neither a loss nor a perplexity.")


class CreateSweep(CreateJob):
    """The body of a job, and how its hyperparameters vary. The jobs are served on promotion only, unless `auto_promote` is true."""

    sweep: SweepSettings


class SweepTrial(BaseModel):
    number: int
    parameters: dict[str, Any]
    status: str = Field(description="waiting (for room among the jobs in flight), refused, or the status of its job.")
    job_id: str | None
    reused: bool = Field(description="An earlier job had done the same; it is the answer.")
    fine_tuned_model: str | None
    value: float | None = Field(description="Of the sweep's metric.")
    cost_micros: int
    error: JobError | None


class SweepCounts(BaseModel):
    total: int
    waiting: int
    running: int
    succeeded: int
    failed: int
    cancelled: int


class Sweep(BaseModel):
    id: str
    object: Literal["fine_tuning.sweep"] = "fine_tuning.sweep"
    created_at: int
    cancelled_at: int | None
    status: str = Field(description="running, succeeded (some trial did), failed, cancelled.")
    model: str
    training_file: str
    strategy: str
    parameters: dict[str, Any]
    max_jobs: int
    seed: int
    metric: str
    goal: str
    trials: Sequence[SweepTrial]
    counts: SweepCounts
    waiting_reason: str | None = Field(description="Why the next trial waits, as its submission was told; null when none was refused.")
    best: SweepTrial | None = Field(description="Of the trials that have succeeded so far, by the metric.")
    cost_micros: int


class ComparedJob(BaseModel):
    id: str
    status: str
    fine_tuned_model: str | None
    hyperparameters: dict[str, Any] = Field(description="All of them, as resolved; as asked, until the spec is frozen.")
    final_loss: float | None
    eval_loss: float | None
    eval_metrics: dict[str, float] = Field(description="Scores of the eval report, `<suite>/<metric>`; the base model's under `base/`.")
    trained_tokens: int | None
    cost_micros: int
    duration_s: float | None


class JobComparison(BaseModel):
    object: Literal["fine_tuning.comparison"] = "fine_tuning.comparison"
    differing: dict[str, list[Any]] = Field(description="Hyperparameters that differ, with their values in the order of `jobs`.")
    jobs: Sequence[ComparedJob]


def sweep(view: SweepView) -> Sweep:
    row, settings = view.row, view.row["settings"]
    shown = {name: settings[name] for name in ("strategy", "parameters", "max_jobs", "seed", "metric", "goal")}
    trials = [trial(t) for t in view.trials]
    return Sweep(
        id=row["id"],
        created_at=epoch_seconds(row["created_at"]),
        cancelled_at=epoch_seconds(row["cancelled_at"]),
        status=view.status.value,
        model=row["request"]["model"],
        training_file=row["request"]["training_file"],
        **shown,
        trials=trials,
        counts=_counts(trials),
        waiting_reason=(row["waits"] or {}).get("reason"),
        best=None if view.best is None else trial(view.best),
        cost_micros=sum(t.cost_micros for t in view.trials),
    )


def trial(view: TrialView) -> SweepTrial:
    row, job = view.row, view.job
    waits = "refused" if row["error"] else "waiting"
    return SweepTrial(
        number=row["number"],
        parameters=row["parameters"],
        status=waits if job is None else openai_status(JobState(job["state"])),
        job_id=row["job_id"],
        reused=row["reused"],
        fine_tuned_model=None if job is None else job["fine_tuned_model"],
        value=view.value,
        cost_micros=view.cost_micros,
        error=JobError(**row["error"]) if row["error"] else None,
    )


def _counts(trials: Sequence[SweepTrial]) -> SweepCounts:
    of = {status: sum(t.status == status for t in trials) for status in ("waiting", "succeeded", "cancelled")}
    failed = sum(t.status in ("failed", "refused") for t in trials)
    return SweepCounts(**of, failed=failed, total=len(trials), running=len(trials) - failed - sum(of.values()))


def comparison(found: Comparison) -> JobComparison:
    return JobComparison(differing={k: list(v) for k, v in found.differing.items()}, jobs=[_compared(c) for c in found.jobs])


def _compared(one: Compared) -> ComparedJob:
    row = one.row
    return ComparedJob(
        id=row["id"],
        status=openai_status(JobState(row["state"])),
        fine_tuned_model=row["fine_tuned_model"],
        hyperparameters=dict(one.hyperparameters),
        final_loss=one.measured.get("train_loss"),
        eval_loss=one.measured.get("eval_loss"),
        eval_metrics={k: v for k, v in one.measured.items() if "/" in k},
        trained_tokens=row["trained_tokens"],
        cost_micros=one.cost_micros,
        duration_s=one.duration_s,
    )
