"""Locality-sensitive keys of texts: two texts that share most of their 5-grams share at least one key, others hardly ever."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ft_assets.datasets.dedup.normalization import CodePoints

NUM_BANDS = 14
"""Keys per text. 14 bands of 9: all of them miss a pair at Jaccard 0.9 with probability (1 - 0.9**9)**14 = 0.0011."""
ROWS_PER_BAND = 9
"""MinHash values per key: 14 * 9 = 126 of the 128."""


def band_keys(texts: CodePoints) -> NDArray[np.uint64]:
    """Returns ``keys[n, NUM_BANDS]``, from one-permutation MinHash over character 5-grams with optimal densification (Shrivastava 2017).

    Texts shorter than five characters are one shingle each: equal keys, equal text. A key's top 40 bits are its band; its other three bytes
    come from the next three bands, so that sorting a band also sorts its runs by further similarity.
    """
    from ft_assets.datasets.dedup import kernels

    keys = np.empty((len(texts), NUM_BANDS), np.uint64)
    kernels.band_hashes(texts.codes, texts.offsets, ROWS_PER_BAND, keys)
    return keys
