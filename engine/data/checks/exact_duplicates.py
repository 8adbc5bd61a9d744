"""Rows that repeat an earlier one word for word, by the hash of their normalized content."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.data.blocks.block_result import BlockResult
from engine.data.blocks.decision import Decision
from engine.data.checks.check import Check, Option


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
            rows = "1 row repeats" if count == 1 else f"{count} rows repeat"
            yield "duplicates_removed", f"{rows} an earlier one word for word and {self.outcome(count)}"


CHECK = ExactDuplicates
