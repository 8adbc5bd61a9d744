"""Precision, recall and F1 of each class, if the expected answers are labels.

1. Answers count as labels if there is one expected answer for every item, each a few words or JSON, with at most :data:`MAX_CLASSES`
   distinct ones, and at least two items for each on average. Labels are compared like ``accuracy``, JSON by value.
2. The classes are the expected labels. An answer that is none of them counts as ``other``: it lowers the recall of its class and nobody's
   precision.
3. Macro averages weigh classes equally, whatever their size. Micro averages count items: precision is over the answers that are a class,
   recall over all.
4. What has no denominator is 0, as in scikit-learn with ``zero_division=0``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.evals.scoring.scores import Subjects, answers_of
from engine.evals.suites import answer_metrics
from engine.evals.suites.answer_metrics import BOOTSTRAP_SAMPLES
from engine.evals.suites.suite_items import HOLDOUT, SHORT_ANSWER_WORDS, Item

MAX_CLASSES = 200
"""Above the 151 of CLINC150, the largest public set of intents in use."""
LABEL_CHARS = 80
"""Characters of a label that a report shows."""
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Averages:
    precision: float
    recall: float
    f1: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassScore:
    label: str
    """As first written in the expected answers, shortened."""
    support: int
    """Items that expect it."""
    predicted: int
    """Answers that are it."""
    precision: float
    recall: float
    f1: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SubjectClasses:
    """One model's answers."""

    accuracy: float
    macro: Averages
    micro: Averages
    num_other: int
    """Answers that are no class."""
    classes: tuple[ClassScore, ...]
    """Most frequent first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Classification:
    n: int
    subjects: Mapping[str, SubjectClasses]
    """By name: ``base``, ``adapter``, and ``previous`` if there is one."""
    macro_f1_ci_low: float
    macro_f1_ci_high: float
    """95 % interval of the gain in macro F1 over the base: paired bootstrap over items."""


def measure(subjects: Subjects, items: Sequence[Item]) -> Classification | None:
    """Returns the scores of each class; None if the expected answers are no labels, or were not answered."""
    answers = answers_of(subjects, HOLDOUT)
    labels = _labels(items)
    if not answers or not labels:
        return None
    at = {label: index for index, label in enumerate(labels)}
    expected = np.array([at[_key(item.expected or "")] for item in items], dtype=np.int64)
    given = {
        name: np.array([at.get(_key(str(texts[item.id])), len(labels)) for item in items], dtype=np.int64)
        for name, texts in answers.items()
    }
    low, high = _interval(expected, given["base"], given["adapter"], len(labels))
    found = {name: _scores(expected, predicted, list(labels.values())) for name, predicted in given.items()}
    return Classification(n=len(items), subjects=found, macro_f1_ci_low=low, macro_f1_ci_high=high)


def _key(text: str) -> str:
    """Returns the class that `text` names: equal for spellings that ``accuracy`` does not distinguish, and for equal JSON."""
    value = answer_metrics.parse_json(text)
    if isinstance(value, dict | list):
        return json.dumps(value, sort_keys=True)
    return answer_metrics.normal_label(text)


def _labels(items: Sequence[Item]) -> dict[str, str]:
    """Returns the classes, each as it was first written; none if the expected answers are no labels."""
    found: dict[str, str] = {}
    for item in items:
        text = item.expected or ""
        long = len(text.split()) > SHORT_ANSWER_WORDS and answer_metrics.json_valid(text) == 0.0
        if long or item.calls or not text.strip():
            return {}
        found.setdefault(_key(text), text[:LABEL_CHARS])
    return found if 2 <= len(found) <= min(MAX_CLASSES, len(items) // 2) else {}


def _counts(expected: Ints, predicted: Ints, num: int) -> tuple[Ints, Ints, Ints]:
    """Returns right answers, expected and predicted ones of each class."""
    right = np.bincount(expected[expected == predicted], minlength=num)[:num]
    return right, np.bincount(expected, minlength=num)[:num], np.bincount(predicted, minlength=num + 1)[:num]


def _rates(right: Ints, support: Ints, predicted: Ints) -> tuple[Floats, Floats, Floats]:
    """Returns precision, recall and F1 of each class."""
    precision = right / np.maximum(predicted, 1)
    recall = right / np.maximum(support, 1)
    return precision, recall, 2 * right / np.maximum(support + predicted, 1)


def _scores(expected: Ints, predicted: Ints, labels: Sequence[str]) -> SubjectClasses:
    right, support, chosen = _counts(expected, predicted, len(labels))
    precision, recall, f1 = _rates(right, support, chosen)
    total, answered = int(right.sum()), int(chosen.sum())
    order = sorted(range(len(labels)), key=lambda i: (-support[i], labels[i]))
    return SubjectClasses(
        accuracy=total / len(expected),
        macro=Averages(precision=float(precision.mean()), recall=float(recall.mean()), f1=float(f1.mean())),
        micro=Averages(precision=total / max(1, answered), recall=total / len(expected), f1=2 * total / (answered + len(expected))),
        num_other=len(expected) - answered,
        classes=tuple(
            ClassScore(
                label=labels[i],
                support=int(support[i]),
                predicted=int(chosen[i]),
                precision=float(precision[i]),
                recall=float(recall[i]),
                f1=float(f1[i]),
            )
            for i in order
        ),
    )


def _interval(expected: Ints, base: Ints, adapter: Ints, num: int) -> tuple[float, float]:
    """Returns the interval of the gain in macro F1; a resample's macro F1 is over the classes that it holds."""
    rng = np.random.default_rng(0)
    gains = np.empty(BOOTSTRAP_SAMPLES)
    for draw in range(BOOTSTRAP_SAMPLES):
        picks = rng.integers(0, len(expected), size=len(expected))
        f1 = [_macro_f1(_counts(expected[picks], predicted[picks], num)) for predicted in (base, adapter)]
        gains[draw] = f1[1] - f1[0]
    low, high = np.percentile(gains, [2.5, 97.5])
    return float(low), float(high)


def _macro_f1(counts: tuple[Ints, Ints, Ints]) -> float:
    return float(_rates(*counts)[2][counts[1] > 0].mean())
