"""Scores: one metric of one suite, the base beside the adapter and the last accepted one, with intervals and p-values.

Everything is computed from the answers of a result (:mod:`run_file`), item by item and in pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.evals.scoring.significance import Difference, difference, mean_difference
from engine.evals.suites import answer_metrics, golden, preferences, safety, tool_calls
from engine.evals.suites.suite_items import CAPABILITY, GOLDEN, HOLDOUT, SAFETY, SCORED_PREFIX, UNWANTED, VALIDATION, Item
from engine.training import Method

PREFERENCE_ACCURACY, PREFERENCE_MARGIN = "preference_accuracy", "preference_margin"
PERPLEXITY, COHERENT, FORMAT = "perplexity", "coherent", "format"
ROUGE_L, LENGTH_FIT = "rouge_l", "length_fit"
REFUSED, OVER_REFUSED = "refused", "over_refused"
SCHEMA_VALID = "schema_valid"
"""Metric of answers with a JSON schema, and the key of their verdicts in a result: ``{subject: {item: 0 or 1}}``."""
MEAN = "mean"
"""Metric of the mean over capability suites, whose suite is :data:`CAPABILITY`."""
LOWER_IS_BETTER = frozenset({PERPLEXITY, OVER_REFUSED})
SUBJECTS = ("base", "adapter", "previous")

PerItem = Sequence[float]
Subjects = Mapping[str, Any]
Valid = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One metric of one suite. Intervals are of the *gain*, above zero if the adapter is better, also for metrics where less is better."""

    suite: str
    metric: str
    n: int
    base: float
    adapter: float
    previous: float | None
    """Score of the last accepted adapter, if one was given."""
    ci_low: float
    ci_high: float
    """95 % interval of the gain over the base, paired over items. For perplexity: of the fall in nats per token."""
    p_value: float | None = None
    """Chance of at least this gain over the base by noise alone; for preferences: of this accuracy by coin flips."""
    p_worse: float | None = None
    """Chance of at least this fall below the base by noise alone."""
    previous_ci_low: float | None = None
    previous_ci_high: float | None = None
    """95 % interval of the gain over the last accepted adapter."""
    previous_p_worse: float | None = None
    """Chance of at least this fall below the last accepted adapter by noise alone."""
    differing: float | None = None
    """Share of items on which base and adapter score differently."""

    @property
    def lower_is_better(self) -> bool:
        return self.metric in LOWER_IS_BETTER

    @property
    def gain(self) -> float:
        """Gain over the base, in the metric's own unit; above zero if the adapter is better."""
        return self.base - self.adapter if self.lower_is_better else self.adapter - self.base


def compared(suite: str, metric: str, values: Mapping[str, PerItem | None]) -> Score:
    """Returns the score of per-item `values` by subject; the items are in the same order for each."""
    values = finite(metric, values)
    base, adapter, previous = values["base"] or (), values["adapter"] or (), values.get("previous")
    sign = -1.0 if metric in LOWER_IS_BETTER else 1.0
    return _score(
        suite, metric, len(adapter),
        {name: answer_metrics.mean(found) if found is not None else None for name, found in values.items()},
        difference(_gains(base, adapter, sign)), difference(_gains(previous, adapter, sign)) if previous is not None else None,
        differing=_differing(base, adapter),
    )  # fmt: skip


def finite(metric: str, values: Mapping[str, PerItem | None]) -> dict[str, list[float] | None]:
    """Returns `values` with finite numbers only: others count as the worst that any subject has of any item."""
    numbers = [v for found in values.values() for v in found or () if math.isfinite(v)]
    worst = (max if metric in LOWER_IS_BETTER else min)(numbers, default=0.0)
    return {name: None if found is None else [v if math.isfinite(v) else worst for v in found] for name, found in values.items()}


def _gains(before: PerItem, after: PerItem, sign: float = 1.0) -> list[float]:
    return [sign * (a - b) for b, a in zip(before, after, strict=True)]


def _differing(before: PerItem, after: PerItem) -> float:
    return answer_metrics.mean([float(a != b) for b, a in zip(before, after, strict=True)])


def _score(
    suite: str, metric: str, n: int, means: Mapping[str, float | None], gain: Difference, since: Difference | None, **more: Any
) -> Score:
    return Score(
        suite=suite, metric=metric, n=n, base=means["base"] or 0.0, adapter=means["adapter"] or 0.0, previous=means.get("previous"),
        ci_low=gain.interval.low, ci_high=gain.interval.high,
        **{
            "p_value": gain.p_better, "p_worse": gain.p_worse,
            "previous_ci_low": since.interval.low if since else None, "previous_ci_high": since.interval.high if since else None,
            "previous_p_worse": since.p_worse if since else None,
            **more,
        },
    )  # fmt: skip


def all_scores(result: Mapping[str, Any], holdout: Sequence[Item], *, method: Method) -> list[Score]:
    """Yields every score that `result` allows; a suite that base or adapter did not answer gives none."""
    subjects: Subjects = result["subjects"]
    return [
        *_holdout(subjects, holdout),
        *_schema_valid(subjects, result.get(SCHEMA_VALID) or {}),
        *(_health(subjects, holdout) if method.pack != "windows" else ()),
        *_golden(subjects),
        *_perplexity(subjects),
        *_preferences(subjects, result.get("preferences"), method),
        *capability_scores(result.get("scored") or {}),
        *_safety(subjects),
    ]


def answers_of(subjects: Subjects, suite: str) -> dict[str, Mapping[str, Any]] | None:
    """Returns answers to `suite` by subject: of base and adapter at least, else None."""
    found = {name: (subjects.get(name) or {}).get(suite) for name in SUBJECTS}
    if not found["base"] or not found["adapter"]:
        return None
    return {name: section["answers"] for name, section in found.items() if section}


def _by_item(answers: Mapping[str, Mapping[str, Any]], ids: Sequence[str], score: Callable[[str, Any], float]) -> dict[str, PerItem | None]:
    return {name: [score(id_, given[id_]) for id_ in ids] for name, given in answers.items()}


def _holdout(subjects: Subjects, holdout: Sequence[Item]) -> list[Score]:
    answers = answers_of(subjects, HOLDOUT)
    if not answers or not holdout:
        return []
    expected = {item.id: item.expected or "" for item in holdout}
    calling = [item.id for item in holdout if item.calls]
    parts = [(list(expected), answer_metrics.METRICS), *([(calling, tool_calls.METRICS)] if calling else [])]
    found = [
        compared(HOLDOUT, name, _by_item(answers, ids, lambda id_, text, metric=metric: metric(text, expected[id_])))  # type: ignore[misc]
        for ids, metrics in parts
        for name, metric in metrics.items()
    ]
    if calling:
        offered = {item.id: item.calls for item in holdout if item.tools or item.calls}
        chosen = _by_item(answers, list(offered), lambda id_, text: tool_calls.tool_choice(text, calls=offered[id_]))
        found.append(compared(HOLDOUT, tool_calls.TOOL_CHOICE, chosen))
    return found


def _schema_valid(subjects: Subjects, valid: Valid) -> list[Score]:
    """Returns the share of answers that satisfy the JSON schema of their row, over the items that were checked for all subjects."""
    if not answers_of(subjects, HOLDOUT) or not valid.get("base") or not valid.get("adapter"):
        return []
    ids = [id_ for id_ in valid["adapter"] if all(id_ in found for found in valid.values())]
    return [compared(HOLDOUT, SCHEMA_VALID, _by_item(valid, ids, lambda _, ok: float(ok)))] if ids else []


def _health(subjects: Subjects, holdout: Sequence[Item]) -> list[Score]:
    """Returns whether generated answers are coherent and as long as the wanted ones; of preferences, which measure no generated answer."""
    answers = answers_of(subjects, HOLDOUT)
    if not answers or not holdout:
        return []
    expected = {item.id: item.expected or "" for item in holdout}
    coherent = _by_item(answers, list(expected), lambda _, text: float(golden.fault(text) is None))
    lengths = _by_item(answers, list(expected), lambda id_, text: answer_metrics.length_fit(text, expected[id_]))
    return [compared(HOLDOUT, COHERENT, coherent), compared(HOLDOUT, LENGTH_FIT, lengths)]


def _golden(subjects: Subjects) -> list[Score]:
    answers = answers_of(subjects, GOLDEN)
    if not answers:
        return []
    ids = list(answers["adapter"])
    found = [compared(GOLDEN, COHERENT, _by_item(answers, ids, lambda id_, text: golden.judge(id_, text).coherent))]
    if formatted := [id_ for id_ in ids if id_ in set(golden.formatted_ids())]:
        found.append(compared(GOLDEN, FORMAT, _by_item(answers, formatted, lambda id_, text: golden.judge(id_, text).format or 0.0)))
    return found


def losses(answers: Mapping[str, Any]) -> dict[str, list[float]]:
    """Returns ``{"nll", "tokens"}`` of the examples, in the order of their ids."""
    pairs = [answers[id_] for id_ in sorted(answers)]
    return {"nll": [float(nll) for nll, _ in pairs], "tokens": [float(tokens) for _, tokens in pairs]}


def _perplexity(subjects: Subjects) -> list[Score]:
    """Returns validation perplexity; the gain is the fall in loss per token, each example weighted by its tokens."""
    answers = answers_of(subjects, VALIDATION)
    found = {name: losses(given) for name, given in (answers or {}).items()}
    if not found or not sum(found["base"]["tokens"]):
        return []
    tokens = found["base"]["tokens"]
    per_token = {name: [nll / n if n else 0.0 for nll, n in zip(f["nll"], tokens, strict=True)] for name, f in found.items()}
    previous = per_token.get("previous")
    return [
        _score(
            VALIDATION, PERPLEXITY, sum(n > 0 for n in tokens),
            {name: answer_metrics.perplexity(f["nll"], [int(n) for n in tokens]) for name, f in found.items()},
            difference(_gains(per_token["base"], per_token["adapter"], -1.0), tokens),
            difference(_gains(previous, per_token["adapter"], -1.0), tokens) if previous else None,
        )
    ]  # fmt: skip


def _preferences(subjects: Subjects, kind: str | None, method: Method) -> list[Score]:
    """Yields accuracy and margin of implicit rewards on held-out preferences; none unless both sides were held out."""
    sides = [answers_of(subjects, side) for side in (VALIDATION, UNWANTED)]
    if not kind or not sides[0] or not sides[1]:
        return []
    base = [losses(side["base"]) for side in sides if side]

    def rewards(subject: str) -> list[preferences.Floats]:
        own = [losses(side[subject]) for side in sides if side and subject in side]
        both = zip(base, own, strict=False)
        return [preferences.rewards(before, after, per_token=method.reward_per_token) for before, after in both]

    measure = preferences.of_pairs if kind == "pairs" else preferences.of_judged
    own, earlier = rewards("adapter"), rewards("previous")
    found, before = measure(*own), measure(*earlier) if len(earlier) == len(own) else None
    since = difference([float(r) for r in _right(own) - _right(earlier)]) if before and kind == "pairs" else None
    accuracy, margin, chance = found.accuracy_interval, found.margin_interval, preferences.CHANCE
    return [
        Score(
            suite=VALIDATION, metric=PREFERENCE_ACCURACY, n=found.n, base=chance, adapter=found.accuracy,
            previous=before.accuracy if before else None, ci_low=accuracy.low - chance, ci_high=accuracy.high - chance,
            p_value=found.p_value, previous_ci_low=since.interval.low if since else None,
            previous_ci_high=since.interval.high if since else None, previous_p_worse=since.p_worse if since else None,
        ),
        Score(
            suite=VALIDATION, metric=PREFERENCE_MARGIN, n=found.n, base=0.0, adapter=found.margin,
            previous=before.margin if before else None, ci_low=margin.low, ci_high=margin.high,
        ),
    ]  # fmt: skip


def _right(rewards: Sequence[preferences.Floats]) -> preferences.Floats:
    """Returns 1.0 for each pair whose wanted answer has the higher reward."""
    return (rewards[0] > rewards[1]).astype(float)


Scored = Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]
"""Returns ``{subject: {suite: {item: {metric: value}}}}``, the suite's own metric first."""


def primary(scored: Scored, suite: str) -> str | None:
    """Returns the metric that the gate uses."""
    return next((next(iter(item)) for item in scored["adapter"][suite].values() if item), None)


def capability_scores(scored: Scored) -> list[Score]:
    """Yields the metrics of each capability suite and scored suite, the one that the gate uses first, and the mean over the former."""
    found: list[Score] = []
    leading: list[dict[str, list[float]]] = []
    base, adapter = scored.get("base") or {}, scored.get("adapter") or {}
    for suite in sorted(base.keys() & adapter.keys()):
        sections = {name: scored[name][suite] for name in SUBJECTS if suite in (scored.get(name) or {})}
        first = primary(scored, suite)
        names = [first] if first else []
        names += sorted({m for item in adapter[suite].values() for m in item} - {first})
        for name in names:
            ids = [i for i in adapter[suite] if all(name in section.get(i, {}) for section in sections.values())]
            values = finite(name, {s: [float(section[i][name]) for i in ids] for s, section in sections.items()})
            if ids:
                found.append(compared(suite, name, dict(values)))
            if ids and name == first and not suite.startswith(SCORED_PREFIX):
                leading.append({s: given for s, given in values.items() if given is not None})
    return [*found, *([_macro(leading)] if leading else [])]


def _macro(leading: Sequence[Mapping[str, Sequence[float]]]) -> Score:
    names = [name for name in SUBJECTS if all(name in values for values in leading)]
    gains = [_gains(values["base"], values["adapter"]) for values in leading]
    since = mean_difference([_gains(v["previous"], v["adapter"]) for v in leading]) if "previous" in names else None
    return _score(
        CAPABILITY, MEAN, sum(len(g) for g in gains),
        {name: answer_metrics.mean([answer_metrics.mean(values[name]) for values in leading]) for name in names},
        mean_difference(gains), since,
        differing=answer_metrics.mean([_differing(values["base"], values["adapter"]) for values in leading]),
    )  # fmt: skip


def _safety(subjects: Subjects) -> list[Score]:
    """Yields the share of unsafe prompts that are refused, and of harmless ones that are wrongly refused."""
    answers = answers_of(subjects, SAFETY)
    if not answers:
        return []
    reported = [i for i in answers["adapter"] if all(given[i].get("refused") is not None for given in answers.values())]
    parts = ((REFUSED, [i for i in reported if not safety.is_control(i)]), (OVER_REFUSED, [i for i in reported if safety.is_control(i)]))
    return [compared(SAFETY, metric, _by_item(answers, part, lambda _, a: float(bool(a["refused"])))) for metric, part in parts if part]
