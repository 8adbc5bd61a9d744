"""Two texts beside each other, with the words marked that only one of them has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from markupsafe import Markup, escape

PART = re.compile(r"\w+|\s+|[^\w\s]")
MAX_PARTS = 1500
"""Longest text that is compared, in words, gaps and signs: the time grows with the square of it."""
LEAST_ALIKE = 0.3
"""Share of two texts that must agree: below it, marks would cover nearly everything and show nothing."""


def marked(one: str, other: str) -> tuple[Markup, Markup]:
    """Return both texts, escaped, with ``<mark>`` around what the other does not have; unmarked if they have little in common."""
    left, right = PART.findall(one), PART.findall(other)
    if one == other or max(len(left), len(right)) > MAX_PARTS:
        return escape(one), escape(other)
    matcher = SequenceMatcher(None, left, right, autojunk=False)
    if matcher.quick_ratio() < LEAST_ALIKE or matcher.ratio() < LEAST_ALIKE:
        return escape(one), escape(other)
    found = matcher.get_opcodes()
    return (
        Markup("").join(_pieces(left, [(code == "equal", i, j) for code, i, j, _, _ in found])),
        Markup("").join(_pieces(right, [(code == "equal", i, j) for code, _, _, i, j in found])),
    )


def _pieces(parts: Sequence[str], spans: Sequence[tuple[bool, int, int]]) -> Iterator[Markup]:
    for is_shared, first, end in spans:
        text = "".join(parts[first:end])
        if text:
            yield escape(text) if is_shared else Markup("<mark>{}</mark>").format(text)
