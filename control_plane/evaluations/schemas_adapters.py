"""Evaluations of registered adapters."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict

from control_plane.evaluations.schemas import EvaluationAdvice, EvaluationVerdict
from control_plane.http.schemas import ApiModel
from control_plane.jobs.schemas import JobError


class CreateEvaluation(ApiModel):
    """An evaluation to run on a registered adapter."""

    model_config = ConfigDict(extra="forbid", strict=True)

    eval_config: dict[str, Any] | None = None
    """Evaluation settings that override those of the adapter's job, such as other capability suites. An evaluation with its own settings
    is informational and never decides whether the adapter is served."""


class AdapterEvaluation(ApiModel):
    """An evaluation of a registered adapter."""

    id: str
    """Id of the evaluation, starting with `ev-`."""
    object: Literal["adapter.evaluation"] = "adapter.evaluation"
    """Object type, always `adapter.evaluation`."""
    adapter_id: str
    """Id of the adapter that is evaluated."""
    job_id: str
    """Id of the job that trained the adapter."""
    base_model: str
    """Id of the base model."""
    base_digest: str
    """SHA-256 digest of the base model the adapter is evaluated on."""
    kind: str
    """`gate` (part of its job), `monitor` (after its promotion), `base_update` (before its base model changes) or `manual` (requested
    through the API)."""
    state: str
    """`queued`, `running`, `succeeded` (there is a verdict) or `failed` (it could not be evaluated)."""
    outcome: str | None
    """`passed` or `quarantined`; null until the evaluation has succeeded."""
    reasons: list[str] | None
    """Codes of the rules that failed; null until the evaluation has succeeded. For a monitored adapter they do not block."""
    eval_config: dict[str, Any] | None
    """Settings that override those of the adapter's job; null if none."""
    error: JobError | None
    """Why the last run failed; null if it did not."""
    runs: int
    """Runs started so far; after three failed runs the evaluation fails."""
    created_at: int
    """When it was requested, as Unix time in seconds."""
    started_at: int | None
    """When its last run started, as Unix time in seconds; null until then."""
    finished_at: int | None
    """When it succeeded or failed, as Unix time in seconds; null until then."""


class AdapterEvaluationReport(ApiModel):
    """Report of a finished evaluation of an adapter."""

    id: str
    """Id of the evaluation."""
    object: Literal["adapter.evaluation.report"] = "adapter.evaluation.report"
    """Object type, always `adapter.evaluation.report`."""
    adapter_id: str
    """Id of the adapter that was evaluated."""
    job_id: str
    """Id of the job that trained the adapter."""
    report: dict[str, Any]
    """What was measured: scores with confidence intervals, sample answers, judge, suites and cost. See docs/evaluations.md for its
    fields."""
    verdict: EvaluationVerdict
    """Outcome, with the result of every rule."""
    advice: list[EvaluationAdvice]
    """Suggestions for the next training run."""
    next_run: dict[str, Any]
    """Hyperparameters that combine all suggestions."""
    samples_url: str
    """Path to list all items with the answers of each model."""
