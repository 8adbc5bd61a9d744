"""Text similarity: the metrics of OpenAI's ``text_similarity`` grader that need neither a model nor a dictionary.

Each returns a number from 0 to 1. Words are those of :mod:`engine.evals.suites.answer_metrics`: letters of every alphabet, with each
Chinese or Japanese character as a word. Tests compare each metric with the library that defines it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from engine.evals import answer_words, bleu, common_subsequence, rouge_l

GLEU_ORDER = 4


def fuzzy_match(output: str, reference: str) -> float:
    """Share of characters in the longest common subsequence, of both texts together: RapidFuzz's ``ratio``."""
    length = len(output) + len(reference)
    return 2 * common_subsequence(output, reference) / length if length else 1.0


def gleu(output: str, reference: str) -> float:
    """Google-BLEU: the smaller of precision and recall over all sequences of one to four words."""
    got, wanted = ([n for size in range(1, GLEU_ORDER + 1) for n in _sequences(answer_words(text), size)] for text in (output, reference))
    return _shared(got, wanted) / max(len(got), len(wanted)) if got and wanted else 0.0


def rouge_n(size: int, output: str, reference: str) -> float:
    """F-measure over sequences of `size` words."""
    got, wanted = _sequences(answer_words(output), size), _sequences(answer_words(reference), size)
    return 2 * _shared(got, wanted) / (len(got) + len(wanted)) if got and wanted else 0.0


METRICS: Mapping[str, Callable[[str, str], float]] = {
    "fuzzy_match": fuzzy_match,
    "bleu": bleu,
    "gleu": gleu,
    **{f"rouge_{n}": partial(rouge_n, n) for n in range(1, 6)},
    "rouge_l": rouge_l,
}
"""By OpenAI's names."""
NEEDS_MORE: Mapping[str, str] = {
    "cosine": "it needs an embedding model",
    "meteor": "it needs a dictionary of synonyms",
}
"""OpenAI's other metrics, with why they are not offered."""


def _sequences(text: Sequence[str], size: int) -> list[tuple[str, ...]]:
    return list(zip(*(text[i:] for i in range(size)), strict=False))


def _shared(left: Sequence[tuple[str, ...]], right: Sequence[tuple[str, ...]]) -> int:
    return sum((Counter(left) & Counter(right)).values())
