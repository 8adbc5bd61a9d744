"""Draws text of the invented language fast: one gather and one mask for a whole block of rows."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from benchmarks.datasets.vocabulary import DRAW_BITS, SEPARATOR_WEIGHTS, quantiles, separators, table

NUM_PHRASES = 20_000
PHRASE_WORDS = 4
PHRASE_SHARE = 0.2
"""Of the words that stand in a phrase which other rows use too: languages have collocations, and these raise the similarity of
rows that are no copies."""
CHUNK_WORDS = 1 << 18
"""Words gathered at a time: the gather of a chunk (6 MB) stays in the cache."""


@cache
def _phrases() -> NDArray[np.uint16]:
    rng = np.random.default_rng(NUM_PHRASES)
    return draw_words(rng, NUM_PHRASES * PHRASE_WORDS, phrases=False).reshape(NUM_PHRASES, PHRASE_WORDS)


@cache
def _separator_draws() -> NDArray[np.uint8]:
    edges = np.cumsum(SEPARATOR_WEIGHTS) / sum(SEPARATOR_WEIGHTS)
    return np.minimum(np.searchsorted(edges, (np.arange(4096) + 0.5) / 4096), len(SEPARATOR_WEIGHTS) - 1).astype(np.uint8)


def draw_words(rng: np.random.Generator, number: int, *, phrases: bool = True) -> NDArray[np.uint16]:
    """Ids of words in running text."""
    ids: NDArray[np.uint16] = quantiles()[rng.integers(0, 1 << DRAW_BITS, number, dtype=np.uint32)]
    if phrases and number > PHRASE_WORDS:
        starts = rng.integers(0, number - PHRASE_WORDS, int(number * PHRASE_SHARE / PHRASE_WORDS))
        which = (NUM_PHRASES * rng.random(len(starts)) ** 3).astype(np.int64)
        ids[starts[:, None] + np.arange(PHRASE_WORDS)] = _phrases()[which]
    return ids


def spell(rng: np.random.Generator, ids: NDArray[np.uint16], script: str = "ascii") -> tuple[bytes, NDArray[np.int64]]:
    """The words with separators after them, escaped for JSON; and where each word starts (one entry more than words)."""
    padded, between = table(script).padded, separators().padded
    width = padded.shape[1]
    pieces: list[bytes] = []
    lengths: list[NDArray[np.int64]] = []
    for start in range(0, len(ids), CHUNK_WORDS):
        chunk = ids[start : start + CHUNK_WORDS]
        cells = np.empty((len(chunk), width + between.shape[1]), np.uint8)
        np.take(padded, chunk, axis=0, out=cells[:, :width])
        cells[:, width:] = between[_separator_draws()[rng.integers(0, 4096, len(chunk), dtype=np.uint16)]]
        used = cells != 0
        pieces.append(cells[used].tobytes())
        lengths.append(used.sum(axis=1))
    starts = np.zeros(len(ids) + 1, np.int64)
    np.cumsum(np.concatenate(lengths), out=starts[1:])
    return b"".join(pieces), starts


def lines_of_words(rng: np.random.Generator, lengths: NDArray[np.int64]) -> list[bytes]:
    """One text for each length (in words), without white space at its end."""
    data, starts = spell(rng, draw_words(rng, int(lengths.sum())))
    edges = starts[np.concatenate(([0], np.cumsum(lengths)))].tolist()
    return [trimmed(data[a:b]) for a, b in pairwise(edges)]


def trimmed(text: bytes) -> bytes:
    """`text` without separators of white space at its end, which may be escaped."""
    while text.endswith((b" ", b"\\n")):
        text = text[:-1] if text.endswith(b" ") else text[:-2]
    return text
