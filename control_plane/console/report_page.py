"""The validation report as one page that needs nothing else: for the API, for ``ft check --html``, for an attachment."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from ft_assets.datasets.histogram import histogram_svg

TEMPLATES = Path(__file__).parent
LENGTHS = ("min", "p50", "mean", "p95", "p99", "max", "total")
SHOWN_APART = frozenset(("characters", "tokens", "histogram"))
"""Statistics that have a table or picture of their own."""


def report_page(report: Mapping[str, Any], *, name: str) -> str:
    """`report` (see ``ft_assets.datasets.report``) as HTML; everything that came from a file is escaped."""
    stats = report.get("stats") or {}
    graph = stats.get("histogram") or {}
    total = sum((report.get("error_counts") or {}).values())
    return _template().render(
        name=name,
        report=report,
        lengths={unit: stats[unit] for unit in ("tokens", "characters") if stats.get(unit)},
        length_names=LENGTHS,
        counts=dict(_flat({k: v for k, v in stats.items() if k not in SHOWN_APART})),
        histogram=histogram_svg(graph["counts"], graph["edges"], unit=graph["unit"]) if graph.get("counts") else "",
        policies=report.get("policies") or {},
        total_problems=total,
        num_hidden=total - len(report.get("errors") or ()),
    )


def _flat(stats: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested statistics as one list of names with dots and values."""
    found: list[tuple[str, Any]] = []
    for name, value in stats.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{name}.")
        elif value is not None:
            found.append((f"{prefix}{name}", value))
    return found


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["number"] = _number
    return environment.get_template("report_page.html")


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
