# Written by `python -m tools.client` from the API's OpenAPI document: change that, and run it again.
"""Objects of the API: adapter evaluations."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from control_plane.client.types.evaluations import EvaluationAdvice, EvaluationVerdict
from control_plane.client.types.jobs import JobError


class AdapterEvaluation(TypedDict):
    id: str
    object: NotRequired[Literal["adapter.evaluation"]]
    adapter_id: str
    job_id: str
    base_model: str
    base_digest: str
    """Of the bytes of the base that the adapter is judged on."""
    kind: str
    """gate: with its job; monitor: after its promotion; base_update: where its base changes; manual: asked for."""
    state: str
    """queued, running, succeeded (there is a verdict) or failed (it could not be judged)."""
    outcome: str | None
    """passed or quarantined, once it has succeeded."""
    reasons: list[str] | None
    """Codes of what failed; of a monitored adapter they do not block."""
    eval_config: dict[str, Any] | None
    error: JobError | None
    """Of the last run that failed."""
    runs: int
    created_at: int
    started_at: int | None
    finished_at: int | None


class AdapterEvaluationReport(TypedDict):
    """What a finished evaluation measured, and what was made of it."""

    id: str
    """Of the evaluation."""
    object: NotRequired[Literal["adapter.evaluation.report"]]
    adapter_id: str
    job_id: str
    report: dict[str, Any]
    """Scores with intervals, samples, judge, suites, cost; see docs/evaluations.md."""
    verdict: EvaluationVerdict
    advice: list[EvaluationAdvice]
    next_run: dict[str, Any]
    """Hyperparameters that all advice together comes to."""
    samples_url: str


class CreateEvaluation(TypedDict):
    eval_config: NotRequired[dict[str, Any] | None]
    """Rules laid over those of the adapter's job, capability suites for instance; such a verdict is for you alone."""
