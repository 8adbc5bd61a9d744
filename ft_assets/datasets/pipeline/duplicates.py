"""Pass 2: finds rows that repeat an earlier one, exactly or nearly, and rows that belong together when the dataset is split."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ft_assets.datasets.dedup import clusters, pairs, verify
from ft_assets.datasets.dedup.normalization import fold, near_text
from ft_assets.datasets.pipeline.columns import Columns
from ft_assets.datasets.pipeline.texts import StoredTexts

BATCH_BYTES = 32 << 20
"""Characters of canonical text whose pairs are verified together; normalized, they take about six times as much."""
MAX_REJECTED = 20_000_000
"""Pairs remembered as different, so that no later band compares them again: 160 MB."""

Rows = NDArray[np.int64]
Found = tuple[Rows, Rows]


@dataclass(frozen=True, kw_only=True, slots=True)
class Near:
    kept: NDArray[np.bool_]
    """False for rows that are near an earlier row that is kept."""
    representative: Rows
    """Lowest row of each row's cluster; itself for a row without near duplicates."""
    left: Rows
    right: Rows
    """The verified pairs: ``left[i] < right[i]``."""


def first_copies(columns: Columns) -> Rows:
    """Returns for each row the first row with the same 128 bits of content hash: itself, unless it is a copy."""
    high, low = columns.read("sha_high"), columns.read("sha_low")
    order = np.lexsort((low, high))  # stable: copies stay in file order
    high, low = high[order], low[order]
    starts = np.concatenate(([True], (high[1:] != high[:-1]) | (low[1:] != low[:-1]))) if len(order) else np.empty(0, bool)
    del high, low
    group_first = order[starts]
    first = np.empty(len(order), np.int64)
    first[order] = group_first[np.cumsum(starts) - 1]
    return first


def near_duplicates(columns: Columns, texts: StoredTexts, among: NDArray[np.bool_], *, progress: Callable[[int], None]) -> Near:
    """Finds near duplicates among the rows marked in `among`; `progress` receives the share of rows done.

    Bands are processed one at a time; rows that an earlier band has shown to be near another are left out of the next:
    :func:`clusters.second_look` finds what that may miss.
    """
    ids = np.flatnonzero(among)
    search = _Search(texts, columns.read("bytes"), columns.read("label"))
    alive = np.ones(len(among), np.bool_)
    for band in range(columns.num_bands):
        candidates = ids[alive[ids]]
        for left, right in pairs.candidate_blocks(columns.band(band)[candidates]):
            search.verify(candidates[left], candidates[right])
        if search.take_news():
            alive = clusters.kept(len(among), search.found())
        progress(len(among) * (band + 1) // columns.num_bands)
    while True:
        search.verify(*clusters.second_look(len(among), search.found()))
        if not search.take_news():
            break
    left, right = search.found()
    kept, representative = clusters.kept(len(among), (left, right)), clusters.representative(len(among), (left, right))
    return Near(kept=kept, representative=representative, left=left, right=right)


class _Search:
    """Pairs that were verified so far, and those that turned out different."""

    def __init__(self, texts: StoredTexts, sizes: NDArray[Any], labels: NDArray[np.uint8]) -> None:
        self._texts, self._sizes, self._labels = texts, sizes, labels
        self._left: list[Rows] = []
        self._right: list[Rows] = []
        self._rejected = np.empty(0, np.uint64)
        self._news = False

    def found(self) -> Found:
        empty = np.empty(0, np.int64)
        return np.concatenate([empty, *self._left]), np.concatenate([empty, *self._right])

    def take_news(self) -> bool:
        """Returns whether a pair was found since the last call."""
        news, self._news = self._news, False
        return news

    def verify(self, left: Rows, right: Rows) -> None:
        """Compares these pairs by exact Jaccard, each once; an answer labeled good is not a copy of itself labeled bad."""
        alike = self._labels[left] == self._labels[right]
        left, right = left[alike], right[alike]
        if not len(left):
            return
        codes = np.unique(np.minimum(left, right).astype(np.uint64) << np.uint64(32) | np.maximum(left, right).astype(np.uint64))
        codes = codes[~_contains(self._rejected, codes)]
        unlike = []
        for batch in self._batches(codes):
            first, second = (batch >> np.uint64(32)).astype(np.int64), (batch & np.uint64(0xFFFFFFFF)).astype(np.int64)
            rows, places = np.unique(np.concatenate((first, second)), return_inverse=True)
            points = fold([near_text(e) for e in self._texts.examples(rows)])
            near = verify.jaccard(points, places[: len(first)], points, places[len(first) :]) >= np.float32(verify.THRESHOLD)
            if near.any():
                self._left.append(first[near])
                self._right.append(second[near])
                self._news = True
            unlike.append(batch[~near])
        if len(self._rejected) < MAX_REJECTED:
            self._rejected = np.union1d(self._rejected, np.concatenate([self._rejected[:0], *unlike]))

    def _batches(self, codes: NDArray[np.uint64]) -> Iterator[NDArray[np.uint64]]:
        if not len(codes):
            return
        sizes = self._sizes[(codes >> np.uint64(32)).astype(np.int64)].astype(np.int64)
        sizes += self._sizes[(codes & np.uint64(0xFFFFFFFF)).astype(np.int64)]
        number = np.cumsum(sizes) // BATCH_BYTES
        yield from np.split(codes, np.flatnonzero(np.diff(number)) + 1)


def _contains(known: NDArray[np.uint64], codes: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Returns which `codes` are in the sorted array `known`."""
    if not len(known):
        return np.zeros(len(codes), np.bool_)
    places = np.minimum(np.searchsorted(known, codes), len(known) - 1)
    return np.asarray(known[places] == codes)
