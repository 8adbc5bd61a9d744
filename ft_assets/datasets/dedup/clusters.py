"""Consequences of verified pairs: which rows to remove, and which rows must stay on one side of a split."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ft_assets.datasets.dedup.pairs import Pairs, Rows


def kept(n: int, pairs: Pairs) -> NDArray[np.bool_]:
    """Returns True for rows to keep: a row is removed only if a pair links it to an earlier row that is kept.

    Not one row per component: similarity is not transitive, and the ends of a chain of small edits can differ in every word.
    """
    from ft_assets.datasets.dedup import kernels

    earlier, later = _ordered(pairs)
    order = np.argsort(later, kind="stable")
    out = np.ones(n, np.bool_)
    kernels.greedy_kept(earlier[order], later[order], out)
    return out


def representative(n: int, pairs: Pairs) -> Rows:
    """Returns the lowest row of each row's connected component, itself for a row without pairs; the split uses it as key."""
    from ft_assets.datasets.dedup import kernels

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
