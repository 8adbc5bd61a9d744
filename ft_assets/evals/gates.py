"""The gate: may an adapter be promoted, judged by its eval report alone.

Rules, in order; every rule is evaluated, so that a quarantined adapter shows all of its faults:

1. ``adapter_applied``: its logits differ from the base's on the same prompt. Never skipped.
2. ``golden``: at least `golden_min_share` of the golden prompts are answered coherently, or as many as by the base.
3. ``task``: the task metric is at least `min_relative_gain` better than the base's, relative to it, and the 95 %
   interval of the gain lies above zero. Where that much gain would pass a perfect score, a perfect score is enough.
   Of preferences the metric is the accuracy of implicit rewards (the base's is 0.5), and in place of the interval stands
   a test: at random it is reached in 5 % of cases at most.
4. ``perplexity``: on validation it is at most `max_perplexity_ratio` times the base's; of preferences, that of the wanted answers.
5. A rule without data passes with the code ``not_measured``; but if neither 3 nor 4 could be measured, or of preferences not 3,
   the verdict is ``nothing_measured``.
6. A rule that the job skips is evaluated and reported, and does not block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ft_assets.evals.config import EvalConfig
from ft_assets.evals.report import PREFERENCE_ACCURACY, Aim, EvalReport, Score

PASSED: Literal["passed"] = "passed"
QUARANTINED: Literal["quarantined"] = "quarantined"
MIN_RELATIVE_GAIN: Mapping[Aim, float] = {"answers": 0.05, "preferences": 0.05, "text": 0.0}
MAX_PERPLEXITY_RATIO: Mapping[Aim, float] = {"answers": 1.0, "preferences": 2.0, "text": 1.0}
"""Defaults of `EvalConfig`, by what was taught."""
ALPHA = 0.05
EPSILON = 1e-9
"""Scores are means of floats: a gain that is exactly the bar must pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    rule: str
    code: str
    """``ok``, ``not_measured``, or the reason code of the failure."""
    passed: bool
    blocking: bool
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    outcome: Literal["passed", "quarantined"]
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        return self.outcome == PASSED

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reason codes of what blocks, in the order of the rules."""
        return tuple(f.code for f in self.findings if f.blocking and not f.passed)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "reasons": list(self.reasons)}


def judge(report: EvalReport, config: EvalConfig) -> Verdict:
    """The verdict on `report` under the rules of this module."""
    findings = [_applied(report)]
    if report.adapter_applied:
        task, perplexity = _task(report, config), _perplexity(report, config)
        findings += [_golden(report, config), task, perplexity]
        if task.code == "not_measured" and (report.aim == "preferences" or perplexity.code == "not_measured"):
            detail = "nothing was held out to measure it on: give a validation file or a larger dataset"
            if report.aim == "preferences":
                detail = "no preferences were held out, or of one side only: give a validation file or a larger dataset"
            findings.append(Finding(rule="measured", code="nothing_measured", passed=False, blocking=True, detail=detail))
    failed = any(f.blocking and not f.passed for f in findings)
    return Verdict(outcome=QUARANTINED if failed else PASSED, findings=tuple(findings))


def task_score(report: EvalReport, config: EvalConfig) -> Score | None:
    """The score that rule 3 compares: the configured metric, or the one that fits what was taught."""
    metric: str = config.task_metric
    if metric == "auto" and report.aim == "preferences":
        metric = PREFERENCE_ACCURACY
    elif metric == "auto":
        metric = "exact_match" if report.literal and report.aim == "answers" else "perplexity"
    return report.score("validation" if metric in ("perplexity", PREFERENCE_ACCURACY) else "holdout", metric)


def _min_gain(report: EvalReport, config: EvalConfig) -> float:
    return MIN_RELATIVE_GAIN[report.aim] if config.min_relative_gain is None else config.min_relative_gain


def _finding(rule: str, config: EvalConfig, failure: str | None, detail: str) -> Finding:
    return Finding(rule=rule, code=failure or "ok", passed=failure is None, blocking=rule not in config.skip, detail=detail)


def _not_measured(rule: str, config: EvalConfig) -> Finding:
    return Finding(rule=rule, code="not_measured", passed=True, blocking=rule not in config.skip, detail="no items for this rule")


def _applied(report: EvalReport) -> Finding:
    detail = f"largest difference of logits from the base: {report.max_logit_difference:.3g}"
    code = "ok" if report.adapter_applied else "adapter_not_applied"
    return Finding(rule="adapter_applied", code=code, passed=report.adapter_applied, blocking=True, detail=detail)


def _golden(report: EvalReport, config: EvalConfig) -> Finding:
    score = report.score("golden", "coherent")
    if score is None:
        return _not_measured("golden", config)
    bar = min(config.golden_min_share, score.base)
    failure = None if score.adapter >= bar - EPSILON else "golden_incoherent"
    return _finding(
        "golden", config, failure, f"{score.adapter:.1%} of {score.n} prompts coherent, {bar:.1%} needed, base {score.base:.1%}"
    )


def _task(report: EvalReport, config: EvalConfig) -> Finding:
    score = task_score(report, config)
    if score is None:
        return _not_measured("task", config)
    if not math.isfinite(score.adapter):
        return _finding("task", config, "task_not_better", f"{score.metric} is not a finite number")
    gain = _min_gain(report, config)
    if score.metric == "perplexity":
        bar = score.base * (1 - gain)
        reached = score.adapter <= bar + EPSILON
        perfect = False
    else:
        bar = min(1.0, score.base * (1 + gain))
        perfect = score.p_value is None and bar == 1.0 and score.adapter >= bar - EPSILON
        reached = perfect or (score.adapter >= bar - EPSILON and score.adapter > score.base)
    detail = (
        f"{score.metric} {score.adapter:.3f}, base {score.base:.3f}, needed {bar:.3f}; gain {score.ci_low:+.3f} to {score.ci_high:+.3f}"
    )
    if score.p_value is not None:
        detail += f"; {score.p_value:.2%} chance of that at random over {score.n}, {ALPHA:.0%} allowed"
    if not reached:
        return _finding("task", config, "task_not_better", detail)
    if score.p_value is not None and score.p_value > ALPHA:
        return _finding("task", config, "task_gain_within_noise", f"{detail}: hold out more of them, or train further")
    if score.p_value is not None:
        return _finding("task", config, None, detail)
    return _finding("task", config, None if score.ci_low > 0 or perfect else "task_gain_within_noise", detail)


def _perplexity(report: EvalReport, config: EvalConfig) -> Finding:
    score = report.score("validation", "perplexity")
    if score is None:
        return _not_measured("perplexity", config)
    ratio = MAX_PERPLEXITY_RATIO[report.aim] if config.max_perplexity_ratio is None else config.max_perplexity_ratio
    bar = score.base * ratio
    failure = None if score.adapter <= bar + EPSILON else "perplexity_worse"
    return _finding("perplexity", config, failure, f"validation perplexity {score.adapter:.3f}, base {score.base:.3f}, at most {bar:.3f}")
