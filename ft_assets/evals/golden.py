"""The golden set: generic prompts on which a healthy model says something, whatever it was tuned for.

Answers are not compared with a right one; a check only tells speech from the noise of a broken adapter.
"""

from __future__ import annotations

import json
import unicodedata
from functools import cache
from importlib import resources

MIN_CHARS_TO_LOOP = 40
"""Shorter answers ("no no no") are not called a loop."""
MAX_PERIOD = 60
"""Longest unit, in characters, whose endless repetition is searched for."""
LOOP_SHARE = 0.6
"""An answer of which more than this share is one unit said again and again is a loop."""
JUNK_SHARE = 0.2
"""More replacement, control or unassigned characters than this is noise: readable text in any script has almost none."""


@cache
def prompts() -> tuple[tuple[str, str], ...]:
    """``(id, prompt)`` of every golden prompt, in file order."""
    lines = resources.files(__package__).joinpath("golden.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    return tuple((row["id"], row["prompt"]) for row in rows)


def fault(text: str) -> str | None:
    """Why `text` is no coherent answer: ``empty``, ``repeating`` or ``degenerate``; None if nothing is wrong."""
    stripped = text.strip()
    if not stripped:
        return "empty"
    if sum(_is_junk(c) for c in stripped) > JUNK_SHARE * len(stripped):
        return "degenerate"
    if not any(c.isalnum() for c in stripped) and len(stripped) > 3:
        return "degenerate"
    if looping_share(stripped) > LOOP_SHARE:
        return "repeating"
    return None


def _is_junk(char: str) -> bool:
    return char == "\ufffd" or (unicodedata.category(char) in {"Cc", "Cn", "Co", "Cs"} and char not in "\n\r\t")


def looping_share(text: str) -> float:
    """Share of `text` that lies in its longest run of one unit repeated at least three times."""
    if len(text) < MIN_CHARS_TO_LOOP:
        return 0.0
    longest = 0
    for period in range(1, min(MAX_PERIOD, len(text) // 3) + 1):
        run = 0
        for i in range(period, len(text)):
            run = run + 1 if text[i] == text[i - period] else 0
            if run >= 2 * period and run + period > longest:
                longest = run + period
    return longest / len(text)
