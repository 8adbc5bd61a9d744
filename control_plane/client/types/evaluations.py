# Written by `python -m tools.client` from the API's OpenAPI document: change that, and run it again.
"""Objects of the API: evaluations."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

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


class CapabilitySuite(TypedDict):
    """A suite of general tasks on which an adapter must not fall behind its base."""

    object: NotRequired[Literal["capability_suite"]]
    name: str
    """What a job's eval_config.capability names."""
    version: str | None
    num_fewshot: int | None
    """Examples before each question; null where the tasks of a group differ."""
    num_items: int | None
    """Rows that it has; null where that is not known before it is loaded."""
    output: str | None
    """multiple_choice, generate_until, loglikelihood or loglikelihood_rolling."""
    shipped: bool
    """Whether its definition comes with the platform; its rows may be the operator's all the same."""
    ready: bool
    reason: str | None
    """Why it is not ready."""
    default: bool
    """Whether jobs that name no suites are evaluated with it."""


class CreateEvaluation(TypedDict):
    eval_config: NotRequired[dict[str, Any] | None]
    """Rules laid over those of the adapter's job, capability suites for instance; such a verdict is for you alone."""


class EvaluationAdvice(TypedDict):
    code: str
    message: str
    evidence: dict[str, Any]
    changes: dict[str, Any]
    """Hyperparameters for the next run."""


class EvaluationSample(TypedDict):
    """One item, as base, adapter and the last accepted adapter answered it."""

    object: NotRequired[Literal["fine_tuning.job.evaluation.sample"]]
    id: str
    """Suite and item; `after` takes it."""
    suite: str
    item_id: str
    prompt: str
    expected: str
    base: str
    adapter: str
    previous: NotRequired[str | None]
    change: Literal["better", "worse", "changed", "same"]
    """`changed`: another answer that scores alike."""
    metric: NotRequired[str | None]
    scores: NotRequired[dict[str, dict[str, float]] | None]
    """By subject, then metric."""
    judge: NotRequired[Literal["win", "draw", "loss"] | None]


class EvaluationVerdict(TypedDict):
    outcome: Literal["passed", "quarantined"]
    mode: Literal["gate", "monitor"]
    basis: NotRequired[Literal["answers", "judge", "preferences", "perplexity", "nothing"] | None]
    """What the task rule compared; `perplexity`: no generated answers were compared."""
    rests_on: str
    """The same in words."""
    reasons: list[str]
    """Codes of what blocks."""
    warnings: list[str]
    """Codes of what does not block and is worth a look."""
    findings: list[Finding]


class Finding(TypedDict):
    """One rule of the gate, with what it found."""

    rule: str
    code: str
    """`ok`, or the reason code of a failure or a warning; see docs/errors.md."""
    passed: bool
    blocking: bool
    """Whether a failure of this rule quarantines the adapter."""
    detail: str
    values: dict[str, Any]
    """The numbers that decided."""
    next_step: str


class JobEvaluation(TypedDict):
    object: NotRequired[Literal["fine_tuning.job.evaluation"]]
    job_id: str
    report: dict[str, Any]
    """Scores with intervals, samples, judge, suites, cost; see docs/evaluations.md."""
    verdict: EvaluationVerdict
    advice: list[EvaluationAdvice]
    next_run: dict[str, Any]
    """Hyperparameters that all advice together comes to."""
    samples_url: str
