"""Evaluations of a registered adapter: what was found, and what is ordered."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from control_plane.evaluations.schemas import EvaluationAdvice, EvaluationVerdict
from control_plane.jobs.schemas import JobError


class CreateEvaluation(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    eval_config: dict[str, Any] | None = Field(
        None, description="Rules laid over those of the adapter's job, capability suites for instance; such a verdict is for you alone."
    )


class AdapterEvaluation(BaseModel):
    id: str
    object: Literal["adapter.evaluation"] = "adapter.evaluation"
    adapter_id: str
    job_id: str
    base_model: str
    base_digest: str = Field(description="Of the bytes of the base that the adapter is judged on.")
    kind: str = Field(
        description="gate: with its job; monitor: after its promotion; base_update: where its base changes; manual: asked for."
    )
    state: str = Field(description="queued, running, succeeded (there is a verdict) or failed (it could not be judged).")
    outcome: str | None = Field(description="passed or quarantined, once it has succeeded.")
    reasons: list[str] | None = Field(description="Codes of what failed; of a monitored adapter they do not block.")
    eval_config: dict[str, Any] | None
    error: JobError | None = Field(description="Of the last run that failed.")
    runs: int
    created_at: int
    started_at: int | None
    finished_at: int | None


class AdapterEvaluationReport(BaseModel):
    """What a finished evaluation measured, and what was made of it."""

    id: str = Field(description="Of the evaluation.")
    object: Literal["adapter.evaluation.report"] = "adapter.evaluation.report"
    adapter_id: str
    job_id: str
    report: dict[str, Any] = Field(description="Scores with intervals, samples, judge, suites, cost; see docs/evaluations.md.")
    verdict: EvaluationVerdict
    advice: list[EvaluationAdvice]
    next_run: dict[str, Any] = Field(description="Hyperparameters that all advice together comes to.")
    samples_url: str
