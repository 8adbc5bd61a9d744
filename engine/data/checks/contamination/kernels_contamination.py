"""Compiled loops that search rows for evaluation items. Import this module inside functions only: it loads numba."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, uint64
from numpy.typing import NDArray

from engine.data.dedup.kernels import MIX_1, Codes, Keys, Offsets, mix

GRAM = 13
"""Words per gram."""
SHORTEST = 8
"""Words of the shortest text that is matched as a whole."""
BASE = uint64(0x9E3779B97F4A7C15)
BASE_POW_GRAM = uint64(pow(0x9E3779B97F4A7C15, GRAM, 1 << 64))
WHOLE = uint64(0xD6E8FEB86659FD93)
"""Distinguishes whole short texts from grams."""


@njit(cache=True, nogil=True)
def word_hashes(codes: Codes, start: int, end: int, classes: Any, out: Keys) -> int:
    """Returns a hash for each word of ``codes[start:end]``; class 1 continues a word, class 2 is a word by itself, 0 is between words."""
    n = 0
    h = uint64(0)
    for i in range(start, end):
        c = codes[i]
        kind = classes[c]
        if kind == 1:
            h = (h ^ uint64(c)) * MIX_1 + BASE
            continue
        if h != uint64(0):
            out[n] = mix(h)
            n += 1
            h = uint64(0)
        if kind == 2:
            out[n] = mix(uint64(c) * MIX_1 + BASE)
            n += 1
    if h != uint64(0):
        out[n] = mix(h)
        n += 1
    return n


@njit(cache=True, nogil=True)
def gram_hashes(words: Keys, num_words: int, out: Keys) -> int:
    """Returns a hash for each 13-gram of `words`; one for the whole text if it has 8 to 12; none if fewer."""
    h = uint64(0)
    if num_words < GRAM:
        if num_words < SHORTEST:
            return 0
        for i in range(num_words):
            h = h * BASE + words[i]
        out[0] = mix(h ^ (WHOLE * uint64(num_words))) | uint64(1)
        return 1
    for i in range(GRAM):
        h = h * BASE + words[i]
    out[0] = mix(h) | uint64(1)
    for i in range(GRAM, num_words):
        h = h * BASE + (words[i] - words[i - GRAM] * BASE_POW_GRAM)
        out[i - GRAM + 1] = mix(h) | uint64(1)
    return num_words - GRAM + 1


@njit(cache=True, nogil=True)
def all_grams(codes: Codes, offsets: Offsets, classes: Any, grams: Keys, counts: Offsets) -> int:
    """Writes the grams of all texts to `grams` in sequence, and the number per text to `counts`."""
    m = 0
    words = np.empty(codes.shape[0] + 1, np.uint64)
    for t in range(offsets.shape[0] - 1):
        num_words = word_hashes(codes, offsets[t], offsets[t + 1], classes, words)
        counts[t] = gram_hashes(words, num_words, grams[m:])
        m += counts[t]
    return m


@njit(cache=True, nogil=True)
def fill_table(grams: Keys, owners: NDArray[np.uint16], table: Keys, table_owners: NDArray[np.uint16], shift: Any, sketch: Any) -> None:
    """Inserts distinct `grams` into the open-address table, and their bits into the sketch that answers most misses."""
    mask = uint64(table.shape[0] - 1)
    sketch_mask = uint64(sketch.shape[0] - 1)
    for i in range(grams.shape[0]):
        p = grams[i] >> shift
        while table[p] != uint64(0):
            p = (p + uint64(1)) & mask
        table[p], table_owners[p] = grams[i], owners[i]
        sketch[(grams[i] >> uint64(4)) & sketch_mask] |= np.uint8(1 << ((grams[i] >> uint64(1)) & uint64(7)))


@njit(cache=True, nogil=True)
def gram_shares(
    codes: Codes,
    offsets: Offsets,
    classes: Any,
    table: Keys,
    table_owners: NDArray[np.uint16],
    shift: Any,
    sketch: Any,
    sets: Any,
    shares: NDArray[np.float32],
    best: NDArray[np.int16],
) -> None:
    """Returns for each text the share of its grams in the table, and the suite (column of `sets`) with most of them or -1."""
    longest = 1
    for t in range(offsets.shape[0] - 1):
        longest = max(longest, offsets[t + 1] - offsets[t])
    words, grams = np.empty(longest, np.uint64), np.empty(longest, np.uint64)
    hits = np.zeros(sets.shape[0], np.int64)
    mask = uint64(table.shape[0] - 1)
    sketch_mask = uint64(sketch.shape[0] - 1)
    for t in range(offsets.shape[0] - 1):
        num_words = word_hashes(codes, offsets[t], offsets[t + 1], classes, words)
        num_grams = gram_hashes(words, num_words, grams)
        found = 0
        for i in range(num_grams):
            g = grams[i]
            if not (sketch[(g >> uint64(4)) & sketch_mask] >> ((g >> uint64(1)) & uint64(7))) & 1:
                continue
            p = g >> shift
            while table[p] != uint64(0) and table[p] != g:
                p = (p + uint64(1)) & mask
            if table[p] == g:
                found += 1
                hits[table_owners[p]] += 1
        shares[t] = found / num_grams if num_grams else 0.0
        best[t] = -1
        if found:
            most = 0
            for suite in range(sets.shape[1]):
                score = 0
                for k in range(sets.shape[0]):
                    score += hits[k] * sets[k, suite]
                if score > most:
                    most, best[t] = score, suite
            hits[:] = 0
