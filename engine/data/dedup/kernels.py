"""Compiled loops of near-duplicate search, which process every character of every row.

Import this module inside functions only: it loads numba. Kernels are few, cached on disk and single-threaded, since worker processes share
the cores. All arithmetic on hashes is modulo 2**64; arrays of code points are read-only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, uint8, uint32, uint64
from numpy.typing import NDArray

Codes = NDArray[np.uint32]
Offsets = NDArray[np.int64]
Keys = NDArray[np.uint64]

GRAM = 5
"""Characters per shingle."""
NUM_BINS = 128
"""Bins of one-permutation hashing: the top 7 bits of a shingle's hash select one."""
BIN_SHIFT = uint64(57)
BASE = uint64(0x9E3779B97F4A7C15)
"""Base of the polynomial over code points (the golden ratio in 64 bits, odd)."""
BASE_POW_GRAM = uint64(pow(0x9E3779B97F4A7C15, GRAM, 1 << 64))
MIX_1, MIX_2 = uint64(0xFF51AFD7ED558CCD), uint64(0xC4CEB9FE1A85EC53)
"""Multipliers of MurmurHash3's 64-bit finalizer."""
EMPTY = uint64(0xFFFFFFFFFFFFFFFF)


@njit(cache=True, nogil=True, inline="always")
def mix(h: Any) -> Any:
    """Every bit of the result depends on every bit of `h`; a bijection, so it adds no collisions."""
    h ^= h >> uint64(33)
    h *= MIX_1
    h ^= h >> uint64(33)
    h *= MIX_2
    return h ^ (h >> uint64(33))


@njit(cache=True, nogil=True, inline="always")
def is_space(c: Any) -> Any:
    """Result of ``str.isspace`` for a code point."""
    if c < 0x80:
        return c == 0x20 or (0x09 <= c <= 0x0D) or (0x1C <= c <= 0x1F)
    if c < 0x1680:
        return c == 0x85 or c == 0xA0
    return c == 0x1680 or (0x2000 <= c <= 0x200A) or c == 0x2028 or c == 0x2029 or c == 0x202F or c == 0x205F or c == 0x3000


@njit(cache=True, nogil=True)
def fold_codes(codes: Codes, offsets: Offsets, out: Codes, out_offsets: Offsets) -> int:
    """Converts ASCII to lower case and collapses white space, text by text; returns the characters written."""
    m = 0
    for t in range(offsets.shape[0] - 1):
        first = m
        pending = False
        for i in range(offsets[t], offsets[t + 1]):
            c = codes[i]
            if is_space(c):
                pending = True
                continue
            if pending:
                pending = False
                if m > first:
                    out[m] = 0x20
                    m += 1
            out[m] = c + uint32(32) if 0x41 <= c <= 0x5A else c
            m += 1
        out_offsets[t + 1] = m
    return m


@njit(cache=True, nogil=True)
def collapse_bytes(data: Any, offsets: Offsets, out: Any, ends: Offsets) -> None:
    """Collapses ASCII white space in each UTF-8 text; none remains at the ends and next to NUL, which separates parts."""
    m = 0
    for t in range(offsets.shape[0] - 1):
        pending, inside = False, False
        for i in range(offsets[t], offsets[t + 1]):
            c = data[i]
            if c <= 0x20 and (c == 0x20 or 0x09 <= c <= 0x0D or 0x1C <= c <= 0x1F):
                pending = True
                continue
            if pending and inside and c != 0:
                out[m] = 0x20
                m += 1
            pending, inside = False, c != 0
            out[m] = c
            m += 1
        ends[t + 1] = m


@njit(cache=True, nogil=True)
def shingle_hashes(codes: Codes, start: int, end: int, out: Keys) -> int:
    """Returns a 64-bit hash for each 5-gram of ``codes[start:end]``, including repeats; a shorter text is one shingle."""
    n = end - start
    h = uint64(0)
    if n < GRAM:
        for i in range(start, end):
            h = h * BASE + uint64(codes[i]) + uint64(1)
        out[0] = mix(h ^ (uint64(n + 1) << uint64(56)))
        return 1
    for i in range(start, start + GRAM):
        h = h * BASE + uint64(codes[i])
    out[0] = mix(h)
    for i in range(start + GRAM, end):
        h = h * BASE + (uint64(codes[i]) - uint64(codes[i - GRAM]) * BASE_POW_GRAM)
        out[i - start - GRAM + 1] = mix(h)
    return n - GRAM + 1


@njit(cache=True, nogil=True)
def band_hashes(codes: Codes, offsets: Offsets, rows_per_band: int, keys: Keys) -> None:
    """Fills ``keys[n, num_bands]`` from one-permutation MinHash signatures with optimal densification."""
    num_bands = keys.shape[1]
    longest = GRAM
    for t in range(offsets.shape[0] - 1):
        longest = max(longest, offsets[t + 1] - offsets[t])
    shingles = np.empty(longest, np.uint64)
    smallest = np.empty(NUM_BINS, np.uint64)
    dense = np.empty(NUM_BINS, np.uint64)
    bands = np.empty(num_bands, np.uint64)
    for t in range(offsets.shape[0] - 1):
        n = shingle_hashes(codes, offsets[t], offsets[t + 1], shingles)
        smallest[:] = EMPTY
        for i in range(n):
            x = shingles[i]
            b = x >> BIN_SHIFT
            smallest[b] = min(smallest[b], x)
        for k in range(NUM_BINS):
            x = smallest[k]
            attempt = uint64(1)
            while x == EMPTY:  # borrow from a bin that depends only on this bin and the attempt: equal sets borrow alike
                x = smallest[mix((uint64(k) << uint64(32)) | attempt) >> BIN_SHIFT]
                attempt += uint64(1)
            dense[k] = x
        for b in range(num_bands):
            h = uint64(b + 1) * BASE
            for k in range(b * rows_per_band, (b + 1) * rows_per_band):
                h = (h ^ dense[k]) * MIX_1
                h ^= h >> uint64(32)
            bands[b] = mix(h)
        for b in range(num_bands):
            key = bands[b] & uint64(0xFFFFFFFFFF000000)
            for more in range(1, 4):
                key |= (bands[(b + more) % num_bands] & uint64(0xFF)) << uint64(24 - 8 * more)
            keys[t, b] = key


@njit(cache=True, nogil=True)
def walk_runs(keys: Keys, order: Offsets, depth: Any, state: Offsets, limits: Offsets, left: Offsets, right: Offsets) -> int:
    """Writes candidate pairs of the sorted `keys` until `left` is full or all are written; returns their number.

    `state` (level, start, end, next position, lowest row to pair with or -1, done) makes the walk resumable. Level 0 identifies runs by
    their top 40 bits. In runs up to ``limits[0]`` rows all rows are paired; larger ones pair each row with the run's lowest row and are
    split by 8 more bits; at the last level each row is also paired with the ``limits[1]`` rows before it.
    """
    n = keys.shape[0]
    small, window = limits[0], limits[1]
    m = 0
    while True:
        level, start, end, at, lowest = state[0], state[1], state[2], state[3], state[4]
        shift = uint64(24 - 8 * level)
        if at >= end:  # the next run that was too large to finish
            start = end
            while start < n and depth[start] & uint8(7) != level:
                start += 1
            if start >= n:
                if level == 3:
                    state[5] = 1
                    return m
                state[0], state[1], state[2], state[3] = level + 1, 0, 0, 0
                continue
            end, first = start + 1, start
            while end < n and (keys[end] ^ keys[start]) >> shift == uint64(0):
                if order[end] < order[first]:
                    first = end
                end += 1
            lowest = order[first] if depth[first] < 8 else -1  # -1: the enclosing run has paired all rows with it
            if end - start > small and level < 3:
                depth[start:end] = level + 1
                depth[first] |= uint8(8)
            state[1], state[2], state[3], state[4] = start, end, start, lowest
            at = start
        large = end - start > small
        reach = end - start if not large else (window if level == 3 else 0)
        while at < end:
            if m + small + window + 1 > left.shape[0]:
                state[3] = at
                return m
            row = order[at]
            begin = max(start, at - reach)
            for p in range(begin, at):
                left[m], right[m] = min(order[p], row), max(order[p], row)
                m += 1
            if large and lowest >= 0 and row != lowest:
                left[m], right[m] = lowest, row
                m += 1
            at += 1
        state[3] = at


@njit(cache=True, nogil=True)
def jaccard_pairs(
    codes_a: Codes, offsets_a: Offsets, rows_a: Offsets, codes_b: Codes, offsets_b: Offsets, rows_b: Offsets, out: NDArray[np.float32]
) -> None:
    """Returns the share of common 5-grams of each pair, with one open-address table whose two low bits record where a gram occurred."""
    shingles = np.empty(1 << 12, np.uint64)
    table = np.zeros(1 << 12, np.uint64)
    for q in range(rows_a.shape[0]):
        start_a, end_a = offsets_a[rows_a[q]], offsets_a[rows_a[q] + 1]
        start_b, end_b = offsets_b[rows_b[q]], offsets_b[rows_b[q] + 1]
        if start_a == end_a or start_b == end_b:
            out[q] = 0.0
            continue
        need = (end_a - start_a) + (end_b - start_b)
        bits = 7
        while (1 << bits) * 5 < need * 8:
            bits += 1
        if (1 << bits) > table.shape[0]:
            table = np.zeros(1 << bits, np.uint64)
            shingles = np.empty(1 << bits, np.uint64)
        table[: 1 << bits] = uint64(0)
        mask, shift = uint64((1 << bits) - 1), uint64(64 - bits)
        union = 0
        for i in range(shingle_hashes(codes_a, start_a, end_a, shingles)):
            key = shingles[i] | uint64(3)
            p = key >> shift
            while table[p] != uint64(0) and table[p] | uint64(3) != key:
                p = (p + uint64(1)) & mask
            union += table[p] == uint64(0)
            table[p] = key ^ uint64(2)  # ...01: in a
        common = 0
        for i in range(shingle_hashes(codes_b, start_b, end_b, shingles)):
            key = shingles[i] | uint64(3)
            p = key >> shift
            while table[p] != uint64(0) and table[p] | uint64(3) != key:
                p = (p + uint64(1)) & mask
            union += table[p] == uint64(0)
            common += table[p] == key ^ uint64(2)
            table[p] = key  # ...11: counted for b
        out[q] = common / union


@njit(cache=True, nogil=True)
def greedy_kept(earlier: Offsets, later: Offsets, kept: Any) -> None:
    """Clears ``kept[row]`` for rows paired with an earlier kept one; pairs must be sorted by their later row."""
    for i in range(later.shape[0]):
        if kept[earlier[i]]:
            kept[later[i]] = False


@njit(cache=True, nogil=True)
def lowest_rows(left: Offsets, right: Offsets, root: Offsets) -> None:
    """Turns ``root = arange(n)`` into the lowest row of each row's connected component."""
    for i in range(left.shape[0]):
        a, b = left[i], right[i]
        while root[a] != a:
            root[a] = root[root[a]]
            a = root[a]
        while root[b] != b:
            root[b] = root[root[b]]
            b = root[b]
        root[max(a, b)] = min(a, b)
    for i in range(root.shape[0]):  # a parent is always lower: one upward pass suffices
        root[i] = root[root[i]]
