"""Scores of one answer against the expected one, and the noise of a difference between two models.

A score of an item is from 0.0 to 1.0; a model's score is the mean over items; two models are compared on the same items, so the interval of
their difference is paired.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

BOOTSTRAP_SAMPLES = 2000
"""Resamples; the 2.5 and 97.5 percentiles of 2,000 are stable to about 0.2 points at n = 200."""


NOT_JSON: Any = object()
"""Result of :func:`parse_json` for text that is not JSON (``None`` is a JSON value)."""


def parse_json(text: str) -> Any:
    """Returns the JSON value of `text`, or :data:`NOT_JSON`; NaN and Infinity are not JSON."""

    def refuse(word: str) -> Any:
        raise ValueError(word)

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return NOT_JSON


def exact_match(output: str, expected: str) -> float:
    """Returns 1.0 if the trimmed texts are equal, or if both are JSON with equal values (key order and spaces do not count)."""
    if output.strip() == expected.strip():
        return 1.0
    got = parse_json(output)
    if got is NOT_JSON:
        return 0.0
    return float(same_json(got, parse_json(expected)))


def same_json(left: Any, right: Any) -> bool:
    """Returns equality of JSON values; unlike in Python, ``true`` is not 1."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_json(v, right[k]) for k, v in left.items())
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same_json, left, right))
    return bool(left == right)


def accuracy(output: str, expected: str) -> float:
    """Returns 1.0 if the labels are equal except for case, surrounding punctuation and spacing."""
    return float(normal_label(output) == normal_label(expected))


def normal_label(text: str) -> str:
    """Returns a label without what :func:`accuracy` does not compare."""
    return re.sub(r"\s+", " ", text).strip(" .,:;!?\"'`*").casefold()


def json_valid(output: str, _expected: str = "") -> float:
    """Returns 1.0 if `output` is one JSON object or array."""
    return float(isinstance(parse_json(output), dict | list))


def token_f1(output: str, expected: str) -> float:
    """Returns the overlap of words as in SQuAD: harmonic mean of precision and recall over the bag of normalized words."""
    got, wanted = _squad_words(output), _squad_words(expected)
    if not got or not wanted:
        return float(got == wanted)
    shared = sum((Counter(got) & Counter(wanted)).values())
    return 2 * shared / (len(got) + len(wanted))


def _squad_words(text: str) -> list[str]:
    """Lower case, then without ASCII punctuation, then without articles: the order of SQuAD's own script."""
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_NO_PUNCTUATION)).split()


_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def bleu(output: str, expected: str) -> float:
    """Returns sentence BLEU of sacrebleu (13a tokens, exponential smoothing, orders that a short sentence has), as a share.

    Its mean over items is compared item by item; it is not corpus BLEU, which has no score per item.
    """
    return min(1.0, float(_bleu_scorer().sentence_score(output, [expected]).score) / 100.0)


def rouge_l(output: str, expected: str) -> float:
    """Returns the F-measure of the longest common subsequence of words: what rouge-score computes (without stemming), for any script.

    Its own words are of the letters a to z alone; here letters of every alphabet count, and every Chinese or Japanese character is a word.
    That, and 3.5 s of imports in each evaluation, is why it is not the library itself; a test compares the two.
    """
    got, wanted = answer_words(output), answer_words(expected)
    return 2 * common_subsequence(got, wanted) / (len(got) + len(wanted)) if got and wanted else 0.0


def answer_words(text: str) -> list[str]:
    return re.findall(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+", text.lower())


def common_subsequence(left: Sequence[str], right: Sequence[str]) -> int:
    """Returns the length of the longest common subsequence, a word of `right` at a time (Hyyro 2004: bits that fell to 0 are matches)."""
    places: dict[str, int] = {}
    for at, word in enumerate(left):
        places[word] = places.get(word, 0) | 1 << at
    whole = row = (1 << len(left)) - 1
    for word in right:
        met = row & places.get(word, 0)
        row = (row + met | row - met) & whole
    return len(left) - row.bit_count()


@cache
def _bleu_scorer() -> Any:
    from sacrebleu.metrics.bleu import BLEU  # only a report that scores text needs it: nothing else waits for its import

    return BLEU(effective_order=True)


def field_accuracy(output: str, expected: str) -> float:
    """Returns the share of the expected JSON object's fields that the output has with equal values; unexpected fields count as wrong.

    If no object is expected, an exact match.
    """
    wanted = parse_json(expected)
    if not isinstance(wanted, dict):
        return exact_match(output, expected)
    got = parse_json(output)
    if not isinstance(got, dict):
        return 0.0
    right = sum(key in got and same_json(got[key], value) for key, value in wanted.items())
    return right / len(wanted.keys() | got.keys()) if wanted or got else 1.0


def length_fit(output: str, expected: str) -> float:
    """Returns the words of the shorter text as a share of those of the longer one: 1.0 for equally long texts."""
    shorter, longer = sorted((len(answer_words(output)), len(answer_words(expected))))
    return shorter / longer if longer else 1.0


METRICS: dict[str, Callable[[str, str], float]] = {
    "exact_match": exact_match,
    "accuracy": accuracy,
    "token_f1": token_f1,
    "bleu": bleu,
    "rouge_l": rouge_l,
    "json_valid": json_valid,
    "field_accuracy": field_accuracy,
}
"""Scores of a holdout item by name, from 0 to 1: ``(output, expected)``."""
WITHOUT_REFERENCE = frozenset({"json_valid"})
"""Metrics that use the output alone."""


def of_answers(*, literal: bool) -> str:
    """Returns the metric that fits the expected answers: exact match for labels and JSON, ROUGE-L for free text.

    By specificity ROUGE-L, token F1, BLEU and chrF distinguish planted adapters equally well
    (``benchmarks/evals_replies_cpu_202611.json``), and by their value none does. ROUGE-L respects the order of words, and supports every
    script.
    """
    return "exact_match" if literal else "rouge_l"


def mean(scores: Sequence[float]) -> float:
    """Returns the arithmetic mean; 0.0 of nothing."""
    return float(np.mean(scores)) if scores else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """95 % confidence interval of a difference."""

    low: float
    high: float


def paired_difference(base: Sequence[float], other: Sequence[float], *, seed: int = 0) -> Interval:
    """Returns the interval of ``mean(other - base)`` by a percentile bootstrap over items; the same seed gives the same interval."""
    if len(base) != len(other):
        raise ValueError(f"a paired interval needs the same items: {len(base)} against {len(other)} scores")
    if not base:
        return Interval(low=0.0, high=0.0)
    diffs = np.asarray(other, dtype=np.float64) - np.asarray(base, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(diffs), size=(BOOTSTRAP_SAMPLES, len(diffs)))
    low, high = np.percentile(diffs[picks].mean(axis=1), [2.5, 97.5])
    return Interval(low=float(low), high=float(high))


def perplexity(nll: Sequence[float], tokens: Sequence[int]) -> float | None:
    """Returns ``exp`` of the mean negative log-likelihood per token; None without tokens."""
    total = sum(tokens)
    return float(np.exp(min(sum(nll) / total, 700.0))) if total else None
