"""Scores on an evaluation's page: which way is better, and where the gain lies in its interval."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from control_plane.console.documents.evaluation_page import evaluation_values


def row_of(score: dict[str, Any]) -> Mapping[str, Any]:
    report = {"scores": [{"n": 60, "previous": None, **score}], "suites": []}
    verdict = {"outcome": "passed", "findings": [], "warnings": [], "mode": "enforce"}
    (table,) = evaluation_values({"job_id": "ftjob-1", "verdict": verdict, "report": report}, curve=(), samples=None)["tables"]
    (row,) = table[1]
    return dict(row)


@pytest.mark.parametrize(
    ("metric", "base", "adapter", "is_lower_better"),
    [
        ("over_refused", 0.30, 0.10, True), ("over_refused", 0.10, 0.30, True), ("refused", 0.10, 0.30, False),
        ("exact_match", 0.30, 0.10, False), ("perplexity", 9.0, 4.0, True),
    ],
)  # fmt: skip
def test_the_gain_lies_inside_its_interval_whichever_way_is_better(metric: str, base: float, adapter: float, is_lower_better: bool) -> None:
    gain = (base - adapter) if is_lower_better else (adapter - base)
    score = {"suite": "safety", "metric": metric, "base": base, "adapter": adapter, "ci_low": gain - 0.05, "ci_high": gain + 0.05}
    row = row_of(score)
    assert row["lower"] == is_lower_better
    bar = str(row["bar"])
    x, width = (float(one) for one in re.findall(r'<rect[^>]*? x="([^"]+)"[^>]*? width="([^"]+)"', bar)[0])
    dot = float(re.findall(r'<circle[^>]*? cx="([^"]+)"', bar)[0])
    assert x < dot < x + width
    assert ("bar good" if gain > 0 else "bar bad") in bar[:40]
