"""Tables of simulations, one column for each policy, in Markdown that also reads well in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HOUR = 3600.0
ROWS: tuple[tuple[str, str, float, str], ...] = (
    ("avg_completion_s", "average completion, h", HOUR, ".2f"),
    ("mean_wait_s", "mean wait, h", HOUR, ".2f"),
    ("p99_wait_s", "p99 wait, h", HOUR, ".1f"),
    ("max_wait_s", "longest wait, h", HOUR, ".1f"),
    ("mean_first_wait_s", "mean wait until the first start, h", HOUR, ".2f"),
    ("max_first_wait_s", "longest wait until the first start, h", HOUR, ".1f"),
    ("bounded_slowdown", "bounded slowdown", 1, ".2f"),
    ("p99_bounded_slowdown", "p99 bounded slowdown", 1, ".1f"),
    ("fairness_mean", "finish-time fairness, mean of tenants", 1, ".2f"),
    ("fairness_worst", "finish-time fairness, worst tenant", 1, ".2f"),
    ("utilisation", "utilisation", 1, ".3f"),
    ("fragmentation", "fragmentation", 1, ".4f"),
    ("idle_while_queued", "GPUs free while jobs wait", 1, ".4f"),
    ("premium_late", "premium jobs that start after 5 min", 1, ".0f"),
    ("broken_reservations", "broken reservations", 1, ".0f"),
    ("slipped_reservations", "reservations late by an overrun or a lost node there", 1, ".0f"),
    ("preemptions", "preemptions", 1, ".0f"),
    ("most_preemptions_of_a_job", "most preemptions of one job", 1, ".0f"),
    ("lost_gpu_s", "GPU-hours lost", HOUR, ".1f"),
    ("jobs", "jobs", 1, ".0f"),
    ("estimate_error", "estimate over duration, root mean square of the logarithm", 1, ".2f"),
)


def of(details: Mapping[str, Mapping[str, Any]]) -> str:
    """All numbers of all policies, then waits by tier and by size."""
    rows = [[title, *(_cell(one, key, scale, form) for one in details.values())] for key, title, scale, form in ROWS]
    for group in ("by_tier", "by_size"):
        names = list(dict.fromkeys(name for one in details.values() for name in one[group]))
        for name in names:
            told = [one[group].get(name) for one in details.values()]
            rows.append([f"{name}: mean / p99 / longest wait, h", *(_waits(one) for one in told)])
    return markdown(["", *details], rows)


def _cell(one: Mapping[str, Any], key: str, scale: float, form: str) -> str:
    return format(one[key] / scale, form) if key in one else ""


def _waits(one: Mapping[str, float] | None) -> str:
    if one is None:
        return ""
    return " / ".join(f"{one[key] / HOUR:.2f}" for key in ("mean_wait_s", "p99_wait_s", "max_wait_s"))


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])
