"""Scores of one answer against the expected one, and the noise of a difference between two models.

A score of an item is 0.0 or 1.0; a model's score is the mean over items; two models are compared on the same items, so
the interval of their difference is a paired one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

BOOTSTRAP_SAMPLES = 2000
"""Resamples; the 2.5 and 97.5 percentiles of 2,000 are stable to about 0.2 points at n = 200."""


class _NotJson:
    """What :func:`parse_json` returns for text that is no JSON (``None`` is a JSON value)."""


NOT_JSON = _NotJson()


def parse_json(text: str) -> Any:
    """The value that `text` spells, or :data:`NOT_JSON`; NaN and Infinity are no JSON."""

    def refuse(word: str) -> Any:
        raise ValueError(word)

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return NOT_JSON


def exact_match(output: str, expected: str) -> float:
    """1.0 if the trimmed texts are equal, or if both are JSON with equal values (key order and spaces do not count)."""
    if output.strip() == expected.strip():
        return 1.0
    got = parse_json(output)
    if got is NOT_JSON:
        return 0.0
    return float(same_json(got, parse_json(expected)))


def same_json(left: Any, right: Any) -> bool:
    """Equality of JSON values; unlike in Python, ``true`` is not 1."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_json(v, right[k]) for k, v in left.items())
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same_json, left, right))
    return bool(left == right)


def accuracy(output: str, expected: str) -> float:
    """1.0 if the labels are equal but for case, surrounding punctuation and spacing."""
    return float(_label(output) == _label(expected))


def _label(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip(" .,:;!?\"'`*").casefold()


def json_valid(output: str, _expected: str = "") -> float:
    """1.0 if `output` is one JSON object or array."""
    return float(isinstance(parse_json(output), dict | list))


METRICS: dict[str, Callable[[str, str], float]] = {"exact_match": exact_match, "accuracy": accuracy, "json_valid": json_valid}


def mean(scores: Sequence[float]) -> float:
    """Arithmetic mean; of nothing, 0.0."""
    return float(np.mean(scores)) if scores else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """95 % confidence interval of a difference."""

    low: float
    high: float


def paired_difference(base: Sequence[float], other: Sequence[float], *, seed: int = 0) -> Interval:
    """Interval of ``mean(other - base)`` by a percentile bootstrap over items; the same seed gives the same interval."""
    if len(base) != len(other):
        raise ValueError(f"a paired interval needs the same items: {len(base)} against {len(other)} scores")
    if not base:
        return Interval(low=0.0, high=0.0)
    diffs = np.asarray(other, dtype=np.float64) - np.asarray(base, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(diffs), size=(BOOTSTRAP_SAMPLES, len(diffs)))
    low, high = np.percentile(diffs[picks].mean(axis=1), [2.5, 97.5])
    return Interval(low=float(low), high=float(high))


def perplexity(nll: Sequence[float], tokens: Sequence[int]) -> float | None:
    """``exp`` of the mean negative log-likelihood per token; None without tokens."""
    total = sum(tokens)
    return float(np.exp(min(sum(nll) / total, 700.0))) if total else None
