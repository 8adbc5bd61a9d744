"""The validation report as one self-contained page: for the API, for ``ft check --html``, for an attachment."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from ft_assets.datasets.checks.contamination.contaminated_rows import contamination_line
from ft_assets.datasets.report.causes import problems_of
from ft_assets.datasets.report.histogram import histogram_svg

TEMPLATES = Path(__file__).parent
LENGTHS = ("min", "p50", "mean", "p95", "p99", "max", "total")
SHOWN_APART = frozenset(("characters", "contamination", "tokens", "histogram"))
"""Statistics with their own table or chart."""

MAX_FLAGGED_SHOWN = 20
"""Rows listed on the page; the JSON has more."""
LEAST_SHARE = 0.01
"""Share of rows from which an answer gets a line."""


def report_page(report: Mapping[str, Any], *, name: str) -> str:
    """Render `report` (see ``ft_assets.datasets.report.validation_report``) as HTML; everything from a file is escaped."""
    stats = report.get("stats") or {}
    graph = stats.get("histogram") or {}
    return _template().render(
        name=name,
        report=report,
        contamination=contamination_line(stats),
        lengths={unit: stats[unit] for unit in ("tokens", "characters") if stats.get(unit)},
        length_names=LENGTHS,
        counts=dict(_flat({k: v for k, v in stats.items() if k not in SHOWN_APART})),
        answers=[a for a in (stats.get("quality") or {}).get("top_answers", ()) if a["share"] >= LEAST_SHARE],
        flagged_shown=MAX_FLAGGED_SHOWN,
        histogram=histogram_svg(graph["counts"], graph["edges"], unit=graph["unit"]) if graph.get("counts") else "",
        policies=report.get("policies") or {},
        problems=problems_of(report),
        first_rows=report.get("first_rows") or (),
    )


def _flat(stats: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Flatten nested statistics into dotted names and values."""
    found: list[tuple[str, Any]] = []
    for name, value in stats.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{name}.")
        elif value not in (None, "", []) and not (isinstance(value, list) and isinstance(value[0], Mapping)):
            found.append((f"{prefix}{name}", value))
    return found


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["number"] = _number
    environment.filters["why"] = _why
    return environment.get_template("report_page.html")


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _why(flag: Mapping[str, Any]) -> str:
    """Describe why a row was flagged."""
    if "of_row" in flag:
        return f"repeats row {flag['of_row']}"
    if "suite" in flag:
        return f"{100 * flag['share']:.0f} % of it is in suite {flag['suite']}"
    return f"score {flag['score']:.2f}"
