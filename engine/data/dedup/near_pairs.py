"""Near duplicates in four steps: MinHash keys, candidate pairs, their exact similarity, and what verified pairs mean for rows.

Texts that share most of their 5-grams share at least one key, others hardly ever. MinHash only proposes, so that no row is dropped on an
estimate. The kernels are imported where they are used: they load numba.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engine.data.dedup.normalization import CodePoints, read_only

NUM_BANDS = 14
"""Keys per text. 14 bands of 9: all of them miss a pair at Jaccard 0.9 with probability (1 - 0.9**9)**14 = 0.0011."""
ROWS_PER_BAND = 9
"""MinHash values per key: 14 * 9 = 126 of the 128."""
THRESHOLD = 0.9
"""Jaccard index of 5-gram sets from which two rows are near duplicates."""

Rows = NDArray[np.int64]
Pairs = tuple[Rows, Rows]
"""Row numbers side by side; the lower of each pair on the left."""

ALL_PAIRS_UP_TO = 32
"""Largest run in which all rows are compared with each other: at most 15.5 pairs per row."""
WINDOW = 8
"""In a huge run that no further bits divide, the number of preceding rows that a row is compared with."""
BLOCK = 1 << 20
"""Pairs per block: 16 MiB."""


def band_keys(texts: CodePoints) -> NDArray[np.uint64]:
    """Returns ``keys[n, NUM_BANDS]``, from one-permutation MinHash over character 5-grams with optimal densification (Shrivastava 2017).

    Texts shorter than five characters are one shingle each: equal keys, equal text. A key's top 40 bits are its band; its other three bytes
    come from the next three bands, so that sorting a band also sorts its runs by further similarity.
    """
    from engine.data.dedup import kernels

    keys = np.empty((len(texts), NUM_BANDS), np.uint64)
    kernels.band_hashes(texts.codes, texts.offsets, ROWS_PER_BAND, keys)
    return keys


def candidate_blocks(band: NDArray[np.uint64], *, block: int = BLOCK) -> Iterator[Pairs]:
    """Yields the pairs of :func:`candidate_pairs` in blocks, so that a file of one template needs no more memory than any other.

    Holds the sorted keys and their order: 17 bytes per row, and 4 more while sorting.
    """
    from engine.data.dedup import kernels

    order = np.argsort(band, kind="stable")
    keys = np.take(band, order)
    depth = np.zeros(len(keys), np.uint8)
    state, limits = np.zeros(6, np.int64), np.array([ALL_PAIRS_UP_TO, WINDOW], np.int64)
    block = max(block, 2 * (ALL_PAIRS_UP_TO + WINDOW + 1))
    while not state[5]:
        left, right = np.empty(block, np.int64), np.empty(block, np.int64)
        found = kernels.walk_runs(keys, order, depth, state, limits, left, right)
        if found:
            yield left[:found], right[:found]


def candidate_pairs(band: NDArray[np.uint64]) -> Pairs:
    """Yields pairs of rows whose keys agree in this band.

    Up to 32 rows with one key: every pair. More: each row with the lowest row of its run, which greedy removal keeps, and the run is
    divided by the further bits of its keys, three times; within the smallest parts every pair, or each row with the 8 before it. So a
    cluster of near copies is reduced to its first row, and close pairs among many rows that merely share a template meet in their own part.
    A pair may occur more than once, here and in other bands.
    """
    blocks = list(candidate_blocks(band))
    if not blocks:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    return np.concatenate([left for left, _ in blocks]), np.concatenate([right for _, right in blocks])


def jaccard(a: CodePoints, ia: ArrayLike, b: CodePoints, ib: ArrayLike) -> NDArray[np.float32]:
    """Returns the Jaccard index of the 5-gram sets of text ``ia[q]`` of `a` and text ``ib[q]`` of `b`, for every q.

    Grams are identified by 62 bits of hash: two texts of 1,000 characters are misjudged by one gram with probability 4e-13. An empty text
    is similar to nothing, not even another empty one: there is no evidence to drop it on.
    """
    from engine.data.dedup import kernels

    rows_a, rows_b = (read_only(np.ascontiguousarray(rows, np.int64)) for rows in (ia, ib))
    if len(rows_a) != len(rows_b):
        raise ValueError(f"{len(rows_a)} rows of a against {len(rows_b)} of b; give one of each for every pair")
    out = np.empty(len(rows_a), np.float32)
    kernels.jaccard_pairs(a.codes, a.offsets, rows_a, b.codes, b.offsets, rows_b, out)
    return out


def kept(n: int, pairs: Pairs) -> NDArray[np.bool_]:
    """Returns True for rows to keep: a row is removed only if a pair links it to an earlier row that is kept.

    Not one row per component: similarity is not transitive, and the ends of a chain of small edits can differ in every word.
    """
    from engine.data.dedup import kernels

    earlier, later = _ordered(pairs)
    order = np.argsort(later, kind="stable")
    out = np.ones(n, np.bool_)
    kernels.greedy_kept(earlier[order], later[order], out)
    return out


def representative(n: int, pairs: Pairs) -> Rows:
    """Returns the lowest row of each row's connected component, itself for a row without pairs; the split uses it as key."""
    from engine.data.dedup import kernels

    left, right = _ordered(pairs)
    root = np.arange(n, dtype=np.int64)
    kernels.lowest_rows(left, right, root)
    return root


def second_look(n: int, pairs: Pairs) -> Pairs:
    """Returns pairs to verify next: a kept row that resembles a removed one, with the row that removed that one.

    Huge runs compare a row with few others; if all of those were removed, this finds the row that represents them. Add the verified ones to
    `pairs` and call again until none verify: each round removes a row or is the last.
    """
    stays = kept(n, pairs)
    earlier, later = _ordered(pairs)
    by = np.full(n, n, np.int64)
    removing = stays[earlier]
    np.minimum.at(by, later[removing], earlier[removing])
    gone, here = np.concatenate((earlier, later)), np.concatenate((later, earlier))
    hint = ~stays[gone] & stays[here]
    found = np.sort(np.stack((by[gone[hint]], here[hint]), axis=1), axis=1)
    found = np.unique(found[found[:, 0] != found[:, 1]], axis=0)
    known = np.isin(found[:, 0] * n + found[:, 1], earlier * n + later)
    return np.ascontiguousarray(found[~known, 0]), np.ascontiguousarray(found[~known, 1])


def _ordered(pairs: Pairs) -> Pairs:
    left, right = (np.asarray(side, np.int64) for side in pairs)
    return np.minimum(left, right), np.maximum(left, right)
