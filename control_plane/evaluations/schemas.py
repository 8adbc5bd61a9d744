"""A job's evaluation: what was measured, what the gate made of it, and what to change in the next run."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class Finding(BaseModel):
    """One rule of the gate, with what it found."""

    rule: str
    code: str = Field(description="`ok`, or the reason code of a failure or a warning; see docs/errors.md.")
    passed: bool
    blocking: bool = Field(description="Whether a failure of this rule quarantines the adapter.")
    detail: str
    values: dict[str, Any] = Field(description="The numbers that decided.")
    next_step: str


class EvaluationVerdict(BaseModel):
    outcome: Literal["passed", "quarantined"]
    mode: Literal["gate", "monitor"]
    basis: Literal["answers", "judge", "preferences", "perplexity", "nothing"] | None = Field(
        None, description="What the task rule compared; `perplexity`: no generated answers were compared."
    )
    rests_on: str = Field(description="The same in words.")
    reasons: list[str] = Field(description="Codes of what blocks.")
    warnings: list[str] = Field(description="Codes of what does not block and is worth a look.")
    findings: list[Finding]


class EvaluationAdvice(BaseModel):
    code: str
    message: str
    evidence: dict[str, Any]
    changes: dict[str, Any] = Field(description="Hyperparameters for the next run.")


class JobEvaluation(BaseModel):
    object: Literal["fine_tuning.job.evaluation"] = "fine_tuning.job.evaluation"
    job_id: str
    report: dict[str, Any] = Field(description="Scores with intervals, samples, judge, suites, cost; see docs/evaluations.md.")
    verdict: EvaluationVerdict
    advice: list[EvaluationAdvice]
    next_run: dict[str, Any] = Field(description="Hyperparameters that all advice together comes to.")
    samples_url: str


class EvaluationSample(BaseModel):
    """One item, as base, adapter and the last accepted adapter answered it."""

    object: Literal["fine_tuning.job.evaluation.sample"] = "fine_tuning.job.evaluation.sample"
    id: str = Field(description="Suite and item; `after` takes it.")
    suite: str
    item_id: str
    prompt: str
    expected: str
    base: str
    adapter: str
    previous: str | None = None
    change: Literal["better", "worse", "changed", "same"] = Field(description="`changed`: another answer that scores alike.")
    metric: str | None = None
    scores: dict[str, dict[str, float]] | None = Field(None, description="By subject, then metric.")
    judge: Literal["win", "draw", "loss"] | None = None
