"""A language of 40,000 invented words: as skewed as English, and nobody's text.

Words are made of syllables; frequent ones are short, as in a real language (Zipf's law of abbreviation). Word r of the list is
drawn with probability ~ 1/r^1.02, which is English's exponent. Every 20th rank from 1,000 to 5,000 is a number, so that about
half of the rows hold digits, as chats do: scanners for personal data would be flattered by rows without any.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_WORDS = 40_000
EXPONENT = 1.02
"""Of Zipf's law; English is measured at 1.0 to 1.1."""
DRAW_BITS = 22
"""Words are drawn by 2^22 equal quantiles: the rarest word still has several."""
VOCABULARY_SEED = 20_261_121
"""The language is the same for every file; the seed of a file draws the text."""

CLUSTERS: Sequence[str] = re.findall("[a-z]+", "bl br ch cl cr dr fl fr gl gr pl pr qu sc sh sk sl sm sn sp st str sw th tr tw wh")
ONSETS = (*4 * "bcdfghklmnprstw", *"jvz", *CLUSTERS)
NUCLEI = (*4 * "aeiou", "ai", "au", "ea", "ee", "ie", "io", "oa", "oo", "ou")
CODAS = (*9 * ("",), *2 * "nrstlmd", "ck", "nd", "ng", "nt", "rn", "ss", "st", "th")
SEPARATORS = (b" ", b", ", b". ", b"? ", b"! ", b"; ", b": ", b'." ', b".\n", b"\n\n", b" - ")
SEPARATOR_WEIGHTS = (0.865, 0.05, 0.05, 0.006, 0.002, 0.003, 0.004, 0.002, 0.01, 0.005, 0.003)

CYRILLIC = str.maketrans("abcdefghijklmnopqrstuvwz", "абцдефгхийклмнопчрстувшз")
GREEK = str.maketrans("abcdefghijklmnopqrstuvwz", "αβχδεφγηιξκλμνοπθρστυβωζ")
ACCENTS = str.maketrans("aeionc", "àéïöñç")
FULL_WIDTH: dict[int, str] = {ord(c): chr(ord(c) + 0xFEE0) for c in "abcdefghijklmnopqrstuvwxyz0123456789"}
SCRIPTS = ("accents", "cyrillic", "greek", "han", "full_width")


@dataclass(frozen=True, kw_only=True, slots=True)
class WordTable:
    """Words as rows of zero-padded UTF-8, so that text is one gather and one mask."""

    words: tuple[bytes, ...]
    padded: NDArray[np.uint8]
    """[NUM_WORDS + separators, width]"""

    @classmethod
    def of(cls, words: list[str]) -> WordTable:
        encoded = tuple(w.encode() for w in words)
        width = max(map(len, encoded))
        return cls(words=encoded, padded=np.array(encoded, dtype=f"S{width}").view(np.uint8).reshape(len(encoded), width))


@cache
def words() -> tuple[str, ...]:
    """The words, most frequent first; none twice."""
    rng = random.Random(VOCABULARY_SEED)
    found: dict[str, None] = {}
    while len(found) < NUM_WORDS:
        rank = len(found)
        if 1_000 <= rank < 5_000 and rank % 20 == 0:
            found[_number(rng)] = None
            continue
        syllables = 1 + int(rng.random() < rank / 1_500) + int(rng.random() < rank / 20_000) + int(rng.random() < 0.1)
        parts = (rng.choice(ONSETS) * (rng.random() < 0.85) + rng.choice(NUCLEI) + rng.choice(CODAS) for _ in range(syllables))
        word = "".join(parts)
        found[word.capitalize() if rng.random() < 0.04 else word] = None
    return tuple(found)


def _number(rng: random.Random) -> str:
    value = rng.randrange(10_000)
    return (
        str(value % 100),
        str(1900 + value % 130),
        f"{value / 100:.2f}",
        f"${value}",
        f"{value % 24}:{value % 60:02}",
        f"{value % 101}%",
    )[value % 6]


@cache
def quantiles() -> NDArray[np.uint16]:
    """[2^DRAW_BITS] word for each quantile of Zipf's law."""
    weight = 1.0 / np.arange(1, NUM_WORDS + 1) ** EXPONENT
    edges = np.cumsum(weight) / weight.sum()
    at = (np.arange(1 << DRAW_BITS) + 0.5) / (1 << DRAW_BITS)
    return np.minimum(np.searchsorted(edges, at), NUM_WORDS - 1).astype(np.uint16)


@cache
def table(script: str = "ascii") -> WordTable:
    """The vocabulary in a script; the same ranks are the same words."""
    if script == "ascii":
        return WordTable.of(list(words()))
    if script == "han":
        rng = np.random.default_rng(VOCABULARY_SEED)
        return WordTable.of(["".join(chr(c) for c in 0x4E00 + rng.integers(0, 3_000, 1 + (rank > 300))) for rank in range(NUM_WORDS)])
    spell: dict[str, Any] = {"accents": ACCENTS, "cyrillic": CYRILLIC, "greek": GREEK, "full_width": FULL_WIDTH}
    return WordTable.of([w.translate(spell[script]) for w in words()])


@cache
def separators() -> WordTable:
    return WordTable.of([s.decode().replace('"', '\\"').replace("\n", "\\n") for s in SEPARATORS])
