"""Class-wise precision, recall and F1 are scikit-learn's, and only of answers that are labels."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict

import pytest

from engine.evals.scoring import classification
from engine.evals.scoring.classification import Classification
from engine.evals.scoring.report import EvalReport, score_table
from engine.evals.suites.suite_items import Item
from tests.support.jobs.evaluation_results import built, result, section, subject

LABELS = ("card lost", "refund", "top up", '{"intent": "other"}')


def items_of(expected: Sequence[str]) -> list[Item]:
    return [Item(id=f"i{k:04d}", messages=({"role": "user", "content": f"q{k}"},), expected=e) for k, e in enumerate(expected)]


def measured(expected: Sequence[str], base: Sequence[str], adapter: Sequence[str]) -> Classification | None:
    items = items_of(expected)
    answers = {name: {i.id: t for i, t in zip(items, texts, strict=True)} for name, texts in (("base", base), ("adapter", adapter))}
    return classification.measure({name: {"holdout": {"answers": given}} for name, given in answers.items()}, items)


def test_rates_are_those_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rng = random.Random(0)
    expected = rng.choices(LABELS, weights=(8, 4, 2, 1), k=120)
    adapter = [e if rng.random() < 0.7 else rng.choice([*LABELS, "no idea"]) for e in expected]
    found = measured(expected, ["refund"] * 120, [a.upper() + "." if a in LABELS[:3] else a for a in adapter])
    assert found is not None
    for name, given in (("base", ["refund"] * 120), ("adapter", adapter)):
        mine = found.subjects[name]
        shown = [c.label for c in mine.classes]
        rates = metrics.precision_recall_fscore_support(expected, given, labels=shown, zero_division=0)
        assert [[c.precision, c.recall, c.f1, c.support] for c in mine.classes] == [
            pytest.approx(list(r)) for r in zip(*rates, strict=True)
        ]
        for kind in ("macro", "micro"):
            wanted = metrics.precision_recall_fscore_support(expected, given, labels=shown, average=kind, zero_division=0)[:3]
            average = getattr(mine, kind)
            assert (average.precision, average.recall, average.f1) == pytest.approx(wanted), (name, kind)
        assert mine.num_other == sum(g not in LABELS for g in given)
    gain = found.subjects["adapter"].macro.f1 - found.subjects["base"].macro.f1
    assert 0.0 < found.macro_f1_ci_low < gain < found.macro_f1_ci_high


def test_classes_are_listed_by_their_number_of_items_and_then_by_name() -> None:
    expected = ["refund"] * 2 + ["card lost"] * 2 + ["top up"] * 4
    found = measured(expected, expected, expected)
    assert found is not None
    assert [(c.label, c.support) for c in found.subjects["base"].classes] == [("top up", 4), ("card lost", 2), ("refund", 2)]


def test_a_rare_class_that_a_resample_lacks_does_not_widen_the_interval() -> None:
    expected = ["yes"] * 19 + ["no"]
    found = measured(expected, ["maybe"] * 20, expected)
    assert found is not None
    assert (found.macro_f1_ci_low, found.macro_f1_ci_high) == (1.0, 1.0)


@pytest.mark.parametrize(
    "expected",
    [
        ["yes"] * 20,
        [str(n) for n in range(20)],
        ["a long answer of more than eight words that nobody would call a label", "no"] * 10,
    ],
    ids=["one class", "all distinct", "free text"],
)
def test_other_answers_are_no_classification(expected: list[str]) -> None:
    assert measured(expected, expected, expected) is None


def test_the_report_shows_classes_and_survives_json() -> None:
    items = items_of(["yes", "no"] * 10)
    made = result(subject(items), {**subject(items), "holdout": section({i.id: i.expected for i in items})})
    report = built(made, items)
    assert report.metrics["holdout/macro_f1"] == 1.0 and report.metrics["base/holdout/macro_f1"] == 0.0
    assert "Macro F1 over 2 classes: base 0.000, adapter 1.000." in score_table(report)

    assert EvalReport.from_dict(json.loads(json.dumps(asdict(report)))) == report
