"""Scores of single answers, and the noise of a difference."""

import csv
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.evals import config
from engine.evals.suites import answer_metrics


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
    assert answer_metrics.exact_match(output, expected) == score


def test_accuracy_compares_labels_and_not_their_dress() -> None:
    assert answer_metrics.accuracy(' "Card  Arrival". ', "card arrival") == 1.0
    assert answer_metrics.accuracy("card delivery", "card arrival") == 0.0


def test_only_an_object_or_array_is_valid_json() -> None:
    assert [answer_metrics.json_valid(t) for t in ("{}", "[1]", "3", '"x"', "{", "")] == [1, 1, 0, 0, 0, 0]


def test_a_clear_gain_has_an_interval_above_zero_and_noise_has_not() -> None:
    rng = np.random.default_rng(1)
    base = [float(x) for x in rng.random(200) < 0.3]
    better = [1.0 if i % 2 else b for i, b in enumerate(base)]
    gain = answer_metrics.paired_difference(base, better)
    assert 0.2 < gain.low < answer_metrics.mean(better) - answer_metrics.mean(base) < gain.high < 0.5
    noise = answer_metrics.paired_difference(base, [float(x) for x in rng.random(200) < 0.3])
    assert noise.low < 0 < noise.high


def test_the_same_scores_give_the_same_interval() -> None:
    one, other = [0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 1.0]
    assert answer_metrics.paired_difference(one, other) == answer_metrics.paired_difference(one, other)


def test_a_paired_interval_needs_the_same_items() -> None:
    with pytest.raises(ValueError, match="2 against 1"):
        answer_metrics.paired_difference([0.0, 1.0], [1.0])


def test_perplexity_weighs_tokens_and_not_examples() -> None:
    assert answer_metrics.perplexity([10.0, 0.0], [1, 9]) == pytest.approx(math.e)
    assert answer_metrics.perplexity([], []) is None


@pytest.mark.parametrize(
    ("output", "expected", "f1"),
    [
        pytest.param("The cat, sat!", "a cat sat", 1.0, id="case, articles and punctuation do not count"),
        pytest.param("the cat sat down", "cat sat", 0.8, id="harmonic mean of precision and recall"),
        pytest.param("cat cat cat", "cat", 0.5, id="a word that is said again is not right again"),
        pytest.param("dog", "cat", 0.0, id="nothing shared"),
        pytest.param("", "the", 1.0, id="nothing where nothing is left of what is expected"),
        pytest.param("", "cat", 0.0, id="nothing where something is expected"),
    ],
)
def test_token_f1(output: str, expected: str, f1: float) -> None:
    assert answer_metrics.token_f1(output, expected) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("output", "expected", "share"),
    [
        pytest.param('{"a": 1, "b": "x"}', '{"b": "x", "a": 1}', 1.0, id="order does not count"),
        pytest.param('{"a": 1, "b": "y"}', '{"a": 1, "b": "x"}', 0.5, id="half of the fields"),
        pytest.param('{"a": 1, "c": 2}', '{"a": 1, "b": null}', 1 / 3, id="a field that nobody expected counts as wrong"),
        pytest.param('{"a": true}', '{"a": 1}', 0.0, id="true is not 1"),
        pytest.param("[1]", '{"a": 1}', 0.0, id="no object"),
        pytest.param("yes ", "yes", 1.0, id="an exact match where no object is expected"),
        pytest.param("{}", "{}", 1.0, id="empty is right where empty is expected"),
    ],
)
def test_field_accuracy(output: str, expected: str, share: float) -> None:
    assert answer_metrics.field_accuracy(output, expected) == pytest.approx(share)


def test_every_metric_that_a_job_may_choose_is_there_and_lies_from_0_to_1() -> None:
    elsewhere = {"auto", "perplexity", "preference_accuracy", "schema_valid", "tool_calls"}
    assert set(answer_metrics.METRICS) == set(config.TASK_METRICS) - elsewhere
    texts = ["", " ", "a", "The cat sat on the mat.", '{"a": 1}', "\u043f\u0440\u0438\u0432\u0435\u0442", "a " * 300, "\n"]
    for metric in answer_metrics.METRICS.values():
        assert all(0.0 <= metric(output, expected) <= 1.0 for output in texts for expected in texts)


def test_text_of_any_script_has_a_longest_common_subsequence() -> None:
    assert (
        answer_metrics.rouge_l(
            "\u043f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440", "\u043f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440"
        )
        == 1.0
    )
    assert answer_metrics.rouge_l("\u4f60\u597d\u4e16\u754c", "\u4f60\u597d\u670b\u53cb") == 0.5


def real_pairs(num: int) -> list[tuple[str, str]]:
    """Solutions of neighbouring problems: real text that shares some words, in another order."""
    path = Path(__file__).parents[5] / "shared" / "data" / "gsm8k_test.jsonl"
    if not path.is_file():
        pytest.skip(f"no GSM8K in {path.parent}")
    with path.open(encoding="utf-8") as lines:
        answers = [json.loads(next(lines))["answer"] for _ in range(num + 1)]
    return list(itertools.pairwise(answers))


def test_bleu_is_that_of_sacrebleu_on_real_text() -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    pairs = real_pairs(60)
    ours = [answer_metrics.bleu(output, expected) for output, expected in pairs]
    theirs = [sacrebleu.sentence_bleu(output, [expected]).score / 100 for output, expected in pairs]
    assert ours == pytest.approx(theirs)
    assert sum(ours) > 0.0


@pytest.mark.slow  # its library imports NLTK for seconds
def test_rouge_l_is_that_of_rouge_score_on_real_text() -> None:
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    pairs = real_pairs(200)
    ours = [answer_metrics.rouge_l(output, expected) for output, expected in pairs]
    assert ours == pytest.approx([scorer.score(expected, output)["rougeL"].fmeasure for output, expected in pairs])
    assert sum(ours) > 0.0


@pytest.mark.slow
def test_token_f1_is_that_of_squad_on_real_questions() -> None:
    squad = pytest.importorskip("lm_eval.tasks.qasper.metrics")  # a copy of SQuAD's script
    path = Path(__file__).parents[5] / "shared" / "data" / "banking77_test.csv"
    if not path.is_file():
        pytest.skip(f"no banking77 in {path.parent}")
    with path.open(encoding="utf-8", newline="") as rows:
        questions = [row["text"] for row in csv.DictReader(rows)][:400]
    pairs = list(itertools.pairwise(questions))
    assert [answer_metrics.token_f1(a, b) for a, b in pairs] == pytest.approx([squad.f1_abstractive([a], [b]) for a, b in pairs])


def test_scoring_text_makes_nobody_wait_for_libraries_who_only_reads_metrics() -> None:
    libraries = {"sacrebleu", "rouge_score", "nltk", "torch"}
    code = f"import sys; import engine.evals.suites.answer_metrics; print(sorted({libraries} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
