"""Which rows a dataset keeps: what each check flags over the whole file, and what its policy does about it, row by row."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.data.blocks.columns import Columns, StoredTexts

MAX_FLAGGED = 250
"""Flagged rows named in a report for each kind: 1,000 in all for the four that ship, as many as bad ones."""


class Decision:
    """The state that the checks change one after the other; an omitted row is no reason to omit another."""

    def __init__(self, columns: Columns, texts: StoredTexts | None, progress: Callable[[int], None]) -> None:
        self.columns, self.texts, self.progress = columns, texts, progress
        self.numbers: NDArray[np.int64] = columns.read("row")
        self.keep = np.ones(len(columns), np.bool_)
        self.first_copies = first_copies(columns)
        """First row with the same content: itself, unless the row is a copy."""
        self.cluster = self.first_copies
        """Row whose content hash determines the split: equal for all copies and near copies."""
        self.counts: Counter[str] = Counter()
        """``exact_duplicates``, ``near_duplicates``, ``contaminated``, ``toxic``, ...: rows found, whatever the policy does with them."""
        self.flagged: list[Mapping[str, Any]] = []
        """``{"row", "code", "action", ...}`` of the first rows found: ``of_row`` of a duplicate, with ``texts`` of both
        for the first near ones; ``suite`` and ``share``; or ``score``."""

    def flag(self, code: str, plural: str, found: NDArray[np.int64], action: str, **details: Any) -> None:
        """Counts the rows at the indexes `found` as `plural`, and leaves them out if `action` is ``drop``.

        `details`: an array or a sequence each, with one value for each row found, or for the first of them.
        """
        self.counts[plural] = len(found)
        shown = [_plain(values[:MAX_FLAGGED]) for values in details.values()]
        for row, *values in itertools.zip_longest(self.numbers[found[:MAX_FLAGGED]].tolist(), *shown):
            known = {name: value for name, value in zip(details, values, strict=True) if value is not None}
            self.flagged.append({"row": row, "code": code, "action": action, **known})
        if action == "drop":
            self.keep[found] = False


def first_copies(columns: Columns) -> NDArray[np.int64]:
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


def _plain(values: Any) -> list[Any]:
    return [round(v, 3) if isinstance(v, float) else v for v in (values.tolist() if isinstance(values, np.ndarray) else values)]
