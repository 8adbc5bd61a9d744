"""Candidate pairs: rows with equal keys in a band, found by sorting, with a bound on the cost of huge groups."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
Pairs = tuple[Rows, Rows]
"""Row numbers side by side; the lower of each pair on the left."""

ALL_PAIRS_UP_TO = 32
"""Largest run in which all rows are compared with each other: at most 15.5 pairs per row."""
WINDOW = 8
"""In a huge run that no further bits divide, the number of preceding rows that a row is compared with."""
BLOCK = 1 << 20
"""Pairs per block: 16 MiB."""


def candidate_blocks(band: NDArray[np.uint64], *, block: int = BLOCK) -> Iterator[Pairs]:
    """Yields the pairs of :func:`candidate_pairs` in blocks, so that a file of one template needs no more memory than any other.

    Holds the sorted keys and their order: 17 bytes per row, and 4 more while sorting.
    """
    from ft_assets.datasets.dedup import kernels

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
