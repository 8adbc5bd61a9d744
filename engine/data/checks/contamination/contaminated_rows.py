"""The check for rows that repeat a contamination list, and what a report says of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.typed_json import from_json
from engine.data.blocks.block_result import BlockResult
from engine.data.blocks.decision import Decision
from engine.data.checks.check import Check, Finding, KeptExamples, Option, Setup
from engine.data.checks.contamination.overlap import SuiteIndex

NO_SUITE = -1


class Contamination(Check):
    name = "contamination"
    options = (
        Option(
            "contamination",
            ("drop", "warn", "review", "fail", "off"),
            help="rows with more than `contamination_threshold` of their 13-grams in a contamination list",
            in_every_id=True,
        ),
        Option(
            "contamination_threshold",
            0.5,
            help="share of a row's 13-grams found in a list from which it counts as contaminated (GPT-3's and Llama 2's measure)",
            in_every_id=True,
        ),
    )
    findings = (
        Finding(
            "contaminated",
            "a row that shares long passages with a contamination list",
            plural="contaminated",
            words="found in a contamination list",
        ),
    )
    order = 50

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._by_suite: dict[str, int] = {}

    @property
    def is_on(self) -> bool:
        return self.setup.options.suites is not None and super().is_on

    @cached_property
    def _index(self) -> SuiteIndex:
        assert self.setup.options.suites is not None
        return SuiteIndex.load(self.setup.options.suites)

    def identity(self) -> Mapping[str, Any]:
        return {"suites": self._index.digest}

    def measure(self, kept: KeptExamples, result: BlockResult) -> Mapping[str, NDArray[Any]]:  # noqa: ARG002 - columns are enough
        shares, suites = self._index.shares(kept.folded)
        return {"contamination": shares, "suite": suites}

    def decide(self, decision: Decision) -> None:
        share, suite = decision.columns.read("contamination"), decision.columns.read("suite")
        threshold = self.policies.options["contamination_threshold"]
        found = np.flatnonzero(decision.keep & (share > threshold) & (suite != NO_SUITE))
        names = list(self._index.suites)
        counts = np.bincount(suite[found].astype(np.int64), minlength=len(names)).tolist()
        self._by_suite = {names[i]: count for i, count in enumerate(counts) if count}
        shown = [names[i] for i in suite[found].tolist()]
        decision.flag("contaminated", "contaminated", found, self.action, suite=shown, share=share[found].round(3))

    def stats(self, total: BlockResult, decision: Decision) -> Mapping[str, Any]:  # noqa: ARG002 - only the decision counts
        checked = list(self._index.suites) if self.is_on else []
        flagged = decision.counts["contaminated"] if checked else None
        return {"contamination": asdict(ContaminationStats(flagged=flagged, suites=self._by_suite, checked=checked))}

    @classmethod
    def lines(cls, stats: Mapping[str, Any]) -> Iterable[str]:
        return [contamination_line(stats)]

    def hint(self, total: BlockResult, decision: Decision) -> str:  # noqa: ARG002 - from the decision
        by_count = sorted(self._by_suite.items(), key=lambda item: -item[1])
        return ": " + ", ".join(f"{suite} {count}" for suite, count in by_count)


CHECK = Contamination


@dataclass(frozen=True, kw_only=True, slots=True)
class ContaminationStats:
    """The check's section of a report's statistics."""

    flagged: int | None = None
    """None if the rows were compared with no suite."""
    suites: Mapping[str, int] = field(default_factory=dict)
    """Rows found by suite."""
    checked: Sequence[str] = ()
    """Suites that the rows were compared with."""


def contamination(stats: Mapping[str, Any]) -> ContaminationStats:
    """Reads the section from a report's `stats`."""
    found = from_json(ContaminationStats, stats.get("contamination") or {}, ignore_unknown=True)
    return replace(found, flagged=(found.flagged or 0) if found.checked else None)


def contamination_line(stats: Mapping[str, Any]) -> str:
    """Returns the result of the contamination check as shown in every report."""
    found = contamination(stats)
    if found.flagged is None:
        return "contamination: not checked"
    each = ", ".join(f"{suite} {count}" for suite, count in found.suites.items())
    compared = f"compared with {', '.join(found.checked)}"
    return f"contamination: {found.flagged} rows found in contamination lists{f' ({each})' if each else ''}; {compared}"
