"""Rows that repeat an earlier one word for word, by the hash of their normalized content."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ft_assets.datasets.checks.check import ACTIONS, Check, Option

if TYPE_CHECKING:
    from ft_assets.datasets.pipeline.block_result import BlockResult
    from ft_assets.datasets.pipeline.columns import Columns
    from ft_assets.datasets.pipeline.decision import Decision


class ExactDuplicates(Check):
    name = "exact_duplicates"
    options = (Option("exact_duplicates", ("drop", "warn"), help="rows equal after normalising white space and Unicode", in_every_id=True),)
    order = 40

    def decide(self, decision: Decision) -> None:
        first = decision.cluster
        copies = np.flatnonzero(first != np.arange(len(first)))
        decision.flag("exact_duplicate", "exact_duplicates", copies, self.action, of_row=decision.numbers[first[copies]])

    def warnings(self, total: BlockResult, decision: Decision) -> Iterator[tuple[str, str]]:  # noqa: ARG002 - only the decision counts
        if count := decision.counts["exact_duplicates"]:
            yield "duplicates_removed", f"{count} rows repeat an earlier one word for word and {ACTIONS[self.action]}"


CHECK = ExactDuplicates


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
