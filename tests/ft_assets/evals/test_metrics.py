"""Scores of single answers, and the noise of a difference."""

import math

import numpy as np
import pytest

from ft_assets.evals import golden, metrics


@pytest.mark.parametrize(
    ("output", "expected", "score"),
    [
        pytest.param(" yes\n", "yes", 1.0, id="outer spaces do not count"),
        pytest.param("Yes", "yes", 0.0, id="case counts"),
        pytest.param('{"b": [1, 2], "a": null}', '{"a":null,"b":[1,2]}', 1.0, id="json is compared by value"),
        pytest.param('{"a": true}', '{"a": 1}', 0.0, id="true is not 1"),
        pytest.param('{"a": 1.0}', '{"a": 1}', 1.0, id="1.0 is 1"),
        pytest.param('{"a": 1', '{"a": 1}', 0.0, id="cut off json is no match"),
        pytest.param("NaN", '"NaN"', 0.0, id="NaN is no json"),
        pytest.param("[" * 5000, "x", 0.0, id="deep nesting is no crash"),
    ],
)
def test_exact_match(output: str, expected: str, score: float) -> None:
    assert metrics.exact_match(output, expected) == score


def test_accuracy_compares_labels_and_not_their_dress() -> None:
    assert metrics.accuracy(' "Card  Arrival". ', "card arrival") == 1.0
    assert metrics.accuracy("card delivery", "card arrival") == 0.0


def test_only_an_object_or_array_is_valid_json() -> None:
    assert [metrics.json_valid(t) for t in ("{}", "[1]", "3", '"x"', "{", "")] == [1, 1, 0, 0, 0, 0]


def test_a_clear_gain_has_an_interval_above_zero_and_noise_has_not() -> None:
    rng = np.random.default_rng(1)
    base = [float(x) for x in rng.random(200) < 0.3]
    better = [1.0 if i % 2 else b for i, b in enumerate(base)]
    gain = metrics.paired_difference(base, better)
    assert 0.2 < gain.low < metrics.mean(better) - metrics.mean(base) < gain.high < 0.5
    noise = metrics.paired_difference(base, [float(x) for x in rng.random(200) < 0.3])
    assert noise.low < 0 < noise.high


def test_the_same_scores_give_the_same_interval() -> None:
    one, other = [0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 1.0]
    assert metrics.paired_difference(one, other) == metrics.paired_difference(one, other)


def test_a_paired_interval_needs_the_same_items() -> None:
    with pytest.raises(ValueError, match="2 against 1"):
        metrics.paired_difference([0.0, 1.0], [1.0])


def test_perplexity_weighs_tokens_and_not_examples() -> None:
    assert metrics.perplexity([10.0, 0.0], [1, 9]) == pytest.approx(math.e)
    assert metrics.perplexity([], []) is None


def test_there_are_fifty_golden_prompts_with_ids_of_their_own() -> None:
    assert len(golden.prompts()) == len({i for i, _ in golden.prompts()}) == 50


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Paris.", None),
        ("no no no", None),
        ('{"category": "billing", "priority": "high", "order": null}', None),
        ("| a | b |\n|---|---|\n| 1 | 2 |", None),
        ("  \n", "empty"),
        ("the the the the the the the the the the the the the", "repeating"),
        ("I see. " + "It is what it is, said the man. " * 6, "repeating"),
        ("2" * 60, "repeating"),
        ("a\ufffd\ufffdb\ufffd", "degenerate"),
        ("?!?!?!?", "degenerate"),
    ],
)
def test_golden_faults(text: str, fault: str | None) -> None:
    assert golden.fault(text) == fault
