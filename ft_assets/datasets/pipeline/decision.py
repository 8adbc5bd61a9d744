"""Decides by the policies which rows a dataset keeps: which are omitted or flagged, and why, row by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ft_assets.datasets.pipeline.columns import Columns
from ft_assets.datasets.pipeline.duplicates import Near, first_copies, near_duplicates
from ft_assets.datasets.pipeline.texts import StoredTexts
from ft_assets.datasets.policies import Policies

MAX_FLAGGED = 250
"""Flagged rows named in a report for each of the four kinds: 1,000 in all, as many as bad ones."""
NO_SUITE = -1


@dataclass(kw_only=True, slots=True)
class Decision:
    keep: NDArray[np.bool_]
    cluster: NDArray[np.int64]
    """Row whose content hash determines the split: equal for all copies and near copies."""
    counts: Counter[str] = field(default_factory=Counter)
    """``exact_duplicates``, ``near_duplicates``, ``contaminated``, ``toxic``: rows found, whatever the policy did with them."""
    by_suite: Counter[str] = field(default_factory=Counter)
    flagged: list[dict[str, Any]] = field(default_factory=list)
    """``{"row", "code", "action", ...}`` of the first rows found: ``of_row`` of a duplicate, ``suite`` and ``share``, or ``score``."""


def decide(
    columns: Columns, texts: StoredTexts | None, policies: Policies, *, suites: Sequence[str], progress: Callable[[int], None]
) -> Decision:
    """Applies the policies of the whole file, in this order; an omitted row is no reason to omit another.

    1. Exact copies of an earlier row.
    2. Rows that repeat an evaluation suite.
    3. Rows that the classifier scores as toxic.
    4. Near duplicates of an earlier row that is still in.
    """
    first = first_copies(columns)
    decision = Decision(keep=np.ones(len(columns), np.bool_), cluster=first)
    numbers = columns.read("row")
    copies = np.flatnonzero(first != np.arange(len(first)))
    decision.counts["exact_duplicates"] = len(copies)
    _flag(decision, "exact_duplicate", policies.exact_duplicates, numbers[copies], of_row=numbers[first[copies]])
    if policies.exact_duplicates == "drop":
        decision.keep[copies] = False
    _contamination(decision, columns, policies, suites, numbers)
    _toxicity(decision, columns, policies, numbers)
    if policies.near_duplicates != "off" and texts is not None and columns.num_bands:
        among = decision.keep.copy()
        among[copies] = False
        _near(decision, near_duplicates(columns, texts, among, progress=progress), first, policies, numbers)
    return decision


def _contamination(decision: Decision, columns: Columns, policies: Policies, suites: Sequence[str], numbers: NDArray[np.int64]) -> None:
    if policies.contamination == "off" or not suites:
        return
    share, suite = columns.read("contamination"), columns.read("suite")
    found = np.flatnonzero(decision.keep & (share > policies.contamination_threshold) & (suite != NO_SUITE))
    decision.counts["contaminated"] = len(found)
    decision.by_suite.update({suites[i]: int(n) for i, n in enumerate(np.bincount(suite[found], minlength=len(suites)).tolist()) if n})
    names = [suites[i] for i in suite[found[:MAX_FLAGGED]].tolist()]
    _flag(decision, "contaminated", policies.contamination, numbers[found], suite=names, share=share[found].round(3))
    if policies.contamination == "drop":
        decision.keep[found] = False


def _toxicity(decision: Decision, columns: Columns, policies: Policies, numbers: NDArray[np.int64]) -> None:
    if policies.toxicity == "off":
        return
    score = columns.read("toxicity")
    found = np.flatnonzero(decision.keep & (score >= policies.toxicity_threshold))
    decision.counts["toxic"] = len(found)
    _flag(decision, "toxic", policies.toxicity, numbers[found], score=score[found].round(3))
    if policies.toxicity == "drop":
        decision.keep[found] = False


def _near(decision: Decision, near: Near, first: NDArray[np.int64], policies: Policies, numbers: NDArray[np.int64]) -> None:
    found = np.flatnonzero(~near.kept[first] & decision.keep)  # a kept copy shares the outcome of the row that it copies
    decision.counts["near_duplicates"] = len(found)
    partner = np.full(len(near.kept), -1, np.int64)
    stays = near.kept[near.left]
    partner[near.right[stays]] = near.left[stays]
    _flag(decision, "near_duplicate", policies.near_duplicates, numbers[found], of_row=numbers[partner[first[found]]])
    decision.cluster = near.representative[decision.cluster]
    if policies.near_duplicates == "drop":
        decision.keep[found] = False


def _flag(decision: Decision, code: str, action: str, rows: NDArray[np.int64], **details: Any) -> None:
    shown = [rows[:MAX_FLAGGED].tolist(), *(_plain(v[:MAX_FLAGGED]) for v in details.values())]
    for row, *values in zip(*shown, strict=True):
        decision.flagged.append({"row": row, "code": code, "action": action, **dict(zip(details, values, strict=True))})


def _plain(values: Any) -> list[Any]:
    return [round(v, 3) if isinstance(v, float) else v for v in (values.tolist() if isinstance(values, np.ndarray) else values)]
