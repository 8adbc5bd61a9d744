"""Controls of the holdout: tests whether answers that are independent of their prompt would score as well.

An adapter that learned only a style gains on every score against expected answers, and so may one that repeats its prompt. So two more
comparisons are made on the same items, with the metric of the task:

- ``other_items``: the adapter's answers against the expected answers of other items. Answers that do not depend on their prompt match those
  as well as their own. The *specificity* of a model is its score corrected for that, as Cohen's kappa corrects an agreement for chance:
  (own - others) / (1 - others). 1: right on every item; 0: no better than for any other prompt.
- ``repeated_prompt``: each item's last prompt turn used as its answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from engine.evals.scoring.scores import Score, Subjects, answers_of, compared
from engine.evals.scoring.significance import difference, least_items
from engine.evals.suites import answer_metrics
from engine.evals.suites.suite_items import HOLDOUT, Item

SPECIFICITY = "specificity"
MAX_FALL = 0.02
"""Fall of the specificity below the base's: two points, as for a capability suite."""
OTHERS = 10
"""Other items that each answer is compared with. They follow it cyclically in the order of the items: every expected answer is used
equally often, so an answer that is always the same has a specificity of exactly 0."""
Name = Literal["other_items", "repeated_prompt"]
MEANING: Mapping[Name, str] = {
    "other_items": "The adapter's answers against the expected answers of other items",
    "repeated_prompt": "The prompt repeated",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    name: Name
    metric: str
    n: int
    value: float
    """Mean score of the control."""
    adapter: float
    """Mean score of the adapter's answers against their own expected answers."""
    ci_low: float
    ci_high: float
    """95 % interval of `adapter` - `value`, paired over items."""
    p_value: float
    """Chance of at least this difference by noise alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Controlled:
    specificity: Score | None = None
    """Specificity of base, adapter and the last accepted adapter; None if it cannot be measured."""
    controls: tuple[Control, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Reason why the adapter's answers do not depend on their prompts, or too little to be distinguished from noise."""

    code: Literal["answers_ignore_prompt", "answers_repeat_prompt", "task_lead_within_noise"]
    detail: str
    values: Mapping[str, Any]


def failure(controls: Sequence[Control], specificity: Score | None, *, alpha: float, alpha_harm: float) -> Failure | None:
    """Returns the first of these; None if nothing is wrong or nothing was measured.

    1. The adapter's answers match their own expected answers no better than those of other items.
    2. Their specificity is more than :data:`MAX_FALL` below the base's: they depend on the prompt less than before.
    3. They do no better than the prompt repeated.
    4. They lead in 1 or 3 by more than :data:`MAX_FALL` of the possible gain, but not beyond noise.

    Noise: `alpha`, as for the gain over the base; for 2 `alpha_harm`, but `alpha` for so few items that it could detect nothing.
    """
    by_name = {control.name: control for control in controls}
    if specificity is None or not by_name:
        return None
    other, echo = by_name["other_items"], by_name["repeated_prompt"]
    allowed = alpha_harm if other.n >= least_items(alpha_harm) else alpha
    if other.p_value > alpha and not _leads(other):
        detail = f"they score as well against the expected answers of other items: {other.value:.3f} (p {other.p_value:.2g})"
        return Failure(code="answers_ignore_prompt", detail=detail, values={"other_items": asdict(other)})
    if specificity.gain < -MAX_FALL and specificity.p_worse is not None and specificity.p_worse <= allowed:
        detail = f"they fit their prompts less than the base's: specificity {specificity.adapter:.3f}, base {specificity.base:.3f}"
        detail += f" (p {specificity.p_worse:.2g})"
        return Failure(code="answers_ignore_prompt", detail=detail, values={"specificity": asdict(specificity)})
    if echo.p_value > alpha and not _leads(echo):
        detail = f"the prompts repeated score as well: {echo.value:.3f} (p {echo.p_value:.2g})"
        return Failure(code="answers_repeat_prompt", detail=detail, values={"repeated_prompt": asdict(echo)})
    if unclear := next((control for control in (other, echo) if control.p_value > alpha), None):
        detail = (
            f"{MEANING[unclear.name][0].lower()}{MEANING[unclear.name][1:]} score {unclear.value:.3f}; the lead over that is within noise "
        )
        detail += f"(p {unclear.p_value:.2g}, and only {alpha:g} or less counts)"
        return Failure(code="task_lead_within_noise", detail=detail, values={unclear.name: asdict(unclear)})
    return None


def _leads(control: Control) -> bool:
    return control.adapter - control.value > MAX_FALL * (1.0 - control.value)


def measure(subjects: Subjects, items: Sequence[Item], *, metric: str) -> Controlled:
    """Returns both controls; nothing if one expected answer serves for all items, or `metric` uses no expected answer."""
    answers = answers_of(subjects, HOLDOUT)
    if not answers or metric in answer_metrics.WITHOUT_REFERENCE or len({item.expected for item in items}) < 2:
        return Controlled()
    own = {name: [_score(metric, given[item.id], item) for item in items] for name, given in answers.items()}
    other = {name: _against_others(metric, given, items) for name, given in answers.items()}
    specific = {name: _specificity(own[name], other[name]) for name in answers}
    echo = [_score(metric, last_turn(item), item) for item in items]
    return Controlled(
        specificity=compared(HOLDOUT, SPECIFICITY, dict(specific)),
        controls=(
            _control("other_items", metric, other["adapter"], own["adapter"]),
            _control("repeated_prompt", metric, echo, own["adapter"]),
        ),
    )


def last_turn(item: Item) -> str:
    """Returns the text of the last turn before the answer; empty if it is not text."""
    content = item.messages[-1].get("content") if item.messages else None
    return content if isinstance(content, str) else ""


def _score(metric: str, answer: str, item: Item) -> float:
    return answer_metrics.METRICS[metric](answer, item.expected or "")


def _against_others(metric: str, answers: Mapping[str, str], items: Sequence[Item]) -> list[float]:
    num = min(OTHERS, len(items) - 1)
    others = [[items[(at + step) % len(items)] for step in range(1, num + 1)] for at in range(len(items))]
    return [answer_metrics.mean([_score(metric, answers[item.id], o) for o in found]) for item, found in zip(items, others, strict=True)]


def _specificity(own: Sequence[float], other: Sequence[float]) -> list[float]:
    """Returns the specificity of each item, so that their mean is the model's; 0 if every answer fits every item."""
    space = 1.0 - answer_metrics.mean(other)
    return [(a - b) / space if space > 0 else 0.0 for a, b in zip(own, other, strict=True)]


def _control(name: Name, metric: str, values: Sequence[float], adapter: Sequence[float]) -> Control:
    found = difference([a - v for v, a in zip(values, adapter, strict=True)])
    return Control(
        name=name, metric=metric, n=len(adapter), value=answer_metrics.mean(values), adapter=answer_metrics.mean(adapter),
        ci_low=found.interval.low, ci_high=found.interval.high, p_value=found.p_better,
    )  # fmt: skip
