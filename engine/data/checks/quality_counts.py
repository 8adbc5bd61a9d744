"""Counters of the quality tally: small arrays of hashes that merge in any order to the same result.

Three kinds, each of bounded size whatever the dataset: lengths in logarithmic bins; the distinct keys with the smallest hashes and their
exact counts (a k-minimum-values sketch: with at most k distinct keys it is exact, beyond that it estimates their number to 1/sqrt(k)); and
a uniform sample of the rows, chosen by the hash of the row number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from engine.data.split import GOLDEN, mixed_bits

Hashes = NDArray[np.uint64]
BINS_PER_OCTAVE = 16
"""Relative width of a bin, 4.4 %: sufficient for a ratio of lengths."""
NUM_BINS = 32 * BINS_PER_OCTAVE
"""Bins up to 2^32 characters."""


def mixed(values: Hashes) -> Hashes:
    """Returns hashes in which equal steps of `values` leave no trace."""
    return mixed_bits(values + np.uint64(GOLDEN))


def text_hashes(texts: Sequence[str]) -> Hashes:
    """Returns a hash for each text, the same in every process: CRC-32 and length, mixed. Of 10M texts of one length 0.1 % collide: too
    many to identify texts by, few enough to count them."""
    sums = [crc32(text.encode("utf-8", "surrogatepass")) for text in texts]
    lengths = np.fromiter(map(len, texts), np.uint64, len(texts))
    return mixed(np.array(sums, np.uint64) | (lengths << np.uint64(32)))


@dataclass(kw_only=True, slots=True)
class Lengths:
    """Histogram of text lengths, to 4.4 %."""

    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_BINS, np.int64))
    longest: int = 0

    def add(self, lengths: NDArray[np.int64]) -> None:
        if lengths.size:
            bins = (np.log2(np.maximum(lengths, 1)) * BINS_PER_OCTAVE).astype(np.int64)
            self.counts += np.bincount(np.minimum(bins, NUM_BINS - 1), minlength=NUM_BINS)
            self.longest = max(self.longest, int(lengths.max()))

    def merge(self, other: Lengths) -> None:
        self.counts = self.counts + other.counts
        self.longest = max(self.longest, other.longest)

    def quantile(self, share: float) -> int:
        """Returns a length that `share` of the texts do not exceed: the middle of its bin."""
        total = int(self.counts.sum())
        if not total:
            return 0
        index = int(np.searchsorted(np.cumsum(self.counts), np.ceil(share * total)))
        return min(self.longest, round(2 ** ((index + 0.5) / BINS_PER_OCTAVE)))

    def num_over(self, length: float) -> int:
        """Returns the number of texts in bins entirely above `length`."""
        return int(self.counts[int(np.log2(max(length, 1.0)) * BINS_PER_OCTAVE) + 1 :].sum())


@dataclass(kw_only=True, slots=True)
class DistinctCounts:
    """Exact counts of the `limit` distinct keys with the smallest hashes: a key that remains was never dropped before."""

    limit: int
    keys: Hashes = field(default_factory=lambda: np.empty(0, np.uint64))
    counts: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def add(self, keys: Hashes) -> None:
        if self.keys.size == self.limit:
            keys = keys[keys <= self.keys[-1]]
        if keys.size:
            self._fold(keys, np.ones(keys.size, np.int64))

    def merge(self, other: DistinctCounts) -> None:
        self._fold(other.keys, other.counts)

    def _fold(self, keys: Hashes, counts: NDArray[np.int64]) -> None:
        self.keys, places = np.unique(np.concatenate([self.keys, keys]), return_inverse=True)
        totals = np.zeros(self.keys.size, np.int64)
        np.add.at(totals, places, np.concatenate([self.counts, counts]))
        self.keys, self.counts = self.keys[: self.limit], totals[: self.limit]

    @property
    def is_exact(self) -> bool:
        return self.keys.size < self.limit

    def num_distinct(self) -> int:
        """Returns the number of distinct keys: exact below the limit, else estimated from the position of the largest kept hash among
        all 2^64."""
        if self.is_exact:
            return int(self.keys.size)
        return round((self.limit - 1) / (float(self.keys[-1]) / 2.0**64))


@dataclass(kw_only=True, slots=True)
class DistinctPairs:
    """Distinct (key, value) pairs of the `limit` keys with the smallest hashes, and at most `per_key` values of each."""

    limit: int
    per_key: int = 4
    """Values kept per key, the smallest ones; enough to detect more than one."""
    keys: Hashes = field(default_factory=lambda: np.empty(0, np.uint64))
    values: Hashes = field(default_factory=lambda: np.empty(0, np.uint64))

    def add(self, keys: Hashes, values: Hashes) -> None:
        if not keys.size:
            return
        keys, values = np.concatenate([self.keys, keys]), np.concatenate([self.values, values])
        order = np.lexsort((values, keys))
        keys, values = keys[order], values[order]
        new_key = np.concatenate([[True], keys[1:] != keys[:-1]])
        fresh = new_key | np.concatenate([[True], values[1:] != values[:-1]])
        keys, values, new_key = keys[fresh], values[fresh], new_key[fresh]
        starts = np.flatnonzero(new_key)
        number = np.cumsum(new_key) - 1
        kept = (number < self.limit) & (np.arange(keys.size) - starts[number] < self.per_key)
        self.keys, self.values = keys[kept], values[kept]

    def merge(self, other: DistinctPairs) -> None:
        self.add(other.keys, other.values)

    def num_keys_and_conflicts(self) -> tuple[int, int]:
        """Returns the number of keys held, and of those with more than one value."""
        counts = np.unique(self.keys, return_counts=True)[1]
        return int(counts.size), int((counts > 1).sum())


def sample_limits(row_numbers: NDArray[np.int64], size: int) -> Hashes:
    """Returns the hash below which a row of each number is sampled: all of the first `size`, then fewer and fewer.

    Row r of a file has at least r rows, so a uniform sample of `size` needs no hash above size / r of the range: a reader of part of the
    file can tell from the row number alone which rows can be in it.
    """
    shares = size / np.maximum(row_numbers, size).astype(np.float64)
    return np.minimum(shares * 2.0**64, 2.0**64 - 2048).astype(np.uint64)
