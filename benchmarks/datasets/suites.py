"""Stand-ins for the benchmarks that training rows must not repeat: as many items as the real test splits have, of like lengths."""

from __future__ import annotations

import json
from functools import cache

import numpy as np

from benchmarks.datasets.text import lines_of_words

SIZES: dict[str, tuple[int, int]] = {
    "mmlu": (14_042, 60),
    "hellaswag": (10_042, 80),
    "arc": (3_548, 45),
    "truthfulqa": (817, 30),
    "gsm8k": (1_319, 45),
}
"""Items of the public test splits, and words of an item in the mean (question and choices)."""
SUITES_SEED = 7


@cache
def escaped_items(suite: str) -> tuple[bytes, ...]:
    """The items as they stand inside a JSON string."""
    number, mean = SIZES[suite]
    rng = np.random.default_rng([SUITES_SEED, *suite.encode()])
    lengths = np.clip(rng.lognormal(np.log(mean) - 0.125, 0.5, number), 9, 400).astype(np.int64)
    return tuple(lines_of_words(rng, lengths))


def suites() -> dict[str, list[str]]:
    """The items as text, by suite."""
    return {name: [json.loads(b'"' + item + b'"') for item in escaped_items(name)] for name in SIZES}
