"""Evaluations of jobs and adapters: measurements, verdict and advice; capability suites."""

from __future__ import annotations

from typing import Literal

from control_plane.http.schemas import ApiBody, ApiModel, EpochSeconds, JsonObject
from control_plane.jobs.schemas import JobError


class Finding(ApiModel):
    """Result of one rule of the evaluation gate."""

    rule: str
    """Name of the rule, such as `task`, `golden`, `capability` or `safety`."""
    code: str
    """`ok`, `not_measured`, or the reason code of the failure or warning, documented in docs/errors.md."""
    passed: bool
    """Whether the rule passed."""
    blocking: bool
    """Whether failing this rule quarantines the adapter."""
    detail: str
    """Human-readable explanation with the numbers."""
    values: JsonObject
    """Numbers behind the result: scores, confidence interval, number of items, limit."""
    next_step: str
    """What to do about it; empty if nothing."""


class EvaluationVerdict(ApiModel):
    """Outcome of an evaluation, with the result of every rule."""

    outcome: Literal["passed", "quarantined"]
    """`passed`, or `quarantined` if a blocking rule failed."""
    mode: Literal["gate", "experiment", "monitor", "off"]
    """`gate` (rules block), `experiment` (rules block the promotion, and the job succeeds), `monitor` or `off` (only an adapter that cannot
    be applied or served is blocked)."""
    basis: Literal["answers", "judge", "preferences", "perplexity", "nothing"] | None = None
    """What the task rule compared: `answers`, `judge` verdicts, `preferences`, `perplexity` (no generated answers) or `nothing`. Null in
    verdicts of earlier versions."""
    rests_on: str
    """`basis` in words."""
    reasons: list[str]
    """Codes of the blocking rules that failed; empty if the adapter passed."""
    warnings: list[str]
    """Codes of findings that do not block but deserve attention."""
    findings: list[Finding]
    """Results of all rules."""


class EvaluationAdvice(ApiModel):
    """A suggestion for the next training run. It never blocks an adapter."""

    code: str
    """Stable code, documented in docs/evaluations.md; empty in reports of earlier versions."""
    message: str
    """Human-readable suggestion."""
    evidence: JsonObject
    """Numbers it is based on."""
    changes: JsonObject
    """Hyperparameters to set in the next run, in the form that `POST /v1/fine_tuning/jobs` accepts."""


class JobEvaluation(ApiModel):
    """Evaluation of a job's adapter."""

    object: Literal["fine_tuning.job.evaluation"] = "fine_tuning.job.evaluation"
    """Object type, always `fine_tuning.job.evaluation`."""
    job_id: str
    """Id of the job whose adapter was evaluated."""
    report: JsonObject
    """What was measured: scores with confidence intervals, sample answers, judge, suites and cost. See docs/evaluations.md for its
    fields."""
    verdict: EvaluationVerdict
    """Outcome, with the result of every rule."""
    advice: list[EvaluationAdvice]
    """Suggestions for the next training run."""
    next_run: JsonObject
    """Hyperparameters that combine all suggestions."""
    samples_url: str
    """Path to list all items with the answers of each model."""


class EvaluationSample(ApiModel):
    """One item of an evaluation, with the answers of the base model, the adapter and the last accepted adapter."""

    object: Literal["fine_tuning.job.evaluation.sample"] = "fine_tuning.job.evaluation.sample"
    """Object type, always `fine_tuning.job.evaluation.sample`."""
    id: str
    """Id of the sample, `<suite>/<item_id>`; pass it as `after` to page."""
    suite: str
    """Suite the item belongs to, such as `holdout`, `safety`, `golden`, `suite/<name>` or `capability/<name>`."""
    item_id: str
    """Id of the item within its suite."""
    prompt: str
    """Prompt, shortened if long; empty for capability suites."""
    expected: str
    """Expected answer, shortened if long; empty if the suite has none."""
    base: str
    """Answer of the base model, shortened if long; empty for capability suites."""
    adapter: str
    """Answer of the adapter, shortened if long; empty for capability suites."""
    previous: str | None = None
    """Answer of the last accepted adapter, shortened if long; null if it was not evaluated."""
    reasoning: dict[str, str] | None = None
    """Reasoning of the answers by model (`base`, `adapter`, `previous`), shortened if long; null if none has any."""
    change: Literal["better", "worse", "changed", "same"]
    """How the adapter compares with the base: `better`, `worse`, `changed` (a different answer with the same score) or `same`."""
    metric: str | None = None
    """Metric that decides about `change`; null if none does."""
    scores: dict[str, dict[str, float]] | None = None
    """Scores by model (`base`, `adapter`, `previous`), then by metric; null if there are none."""
    judge: Literal["win", "draw", "loss"] | None = None
    """Verdict of the judge for the adapter against the base: `win`, `draw` or `loss`. Null if the item was not judged."""


class CreateEvaluation(ApiBody):
    """An evaluation to run on a registered adapter."""

    eval_config: JsonObject | None = None
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
    eval_config: JsonObject | None
    """Settings that override those of the adapter's job; null if none."""
    error: JobError | None
    """Why the last run failed; null if it did not."""
    runs: int
    """Runs started so far; after three failed runs the evaluation fails."""
    created_at: EpochSeconds
    """When it was requested, as Unix time in seconds."""
    started_at: EpochSeconds | None
    """When its last run started, as Unix time in seconds; null until then."""
    finished_at: EpochSeconds | None
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
    report: JsonObject
    """What was measured: scores with confidence intervals, sample answers, judge, suites and cost. See docs/evaluations.md for its
    fields."""
    verdict: EvaluationVerdict
    """Outcome, with the result of every rule."""
    advice: list[EvaluationAdvice]
    """Suggestions for the next training run."""
    next_run: JsonObject
    """Hyperparameters that combine all suggestions."""
    samples_url: str
    """Path to list all items with the answers of each model."""


class CapabilitySuite(ApiModel):
    """A suite of general tasks on which an adapter must not fall behind its base model."""

    object: Literal["capability_suite"] = "capability_suite"
    """Object type, always `capability_suite`."""
    name: str
    """Name to list in `eval_config.capability` of a job."""
    version: str | None
    """Version of the definition; null if it states none."""
    num_fewshot: int | None
    """Examples shown before each question; null if the tasks of a group differ."""
    num_items: int | None
    """Items in the suite; null if unknown until it is loaded."""
    output: str | None
    """How answers are obtained: `multiple_choice`, `generate_until`, `loglikelihood` or `loglikelihood_rolling`. Null for groups."""
    shipped: bool
    """Whether its definition ships with the platform. Its items may still have to be provided by the operator."""
    ready: bool
    """Whether jobs can be evaluated with it now."""
    reason: str | None
    """Why it is not ready; null if it is."""
    default: bool
    """Whether jobs that name no suites are evaluated with it."""
