"""The validation report as a page: for the API, for ``ft check --html``, for the console."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from control_plane.console.jinja_environment import document
from ft_assets.datasets.checks.contamination.contaminated_rows import contamination_line
from ft_assets.datasets.report.causes import problems_of
from ft_assets.datasets.report.histogram import histogram_svg

LENGTHS = ("min", "p50", "mean", "p95", "p99", "max", "total")
SHOWN_APART = frozenset(("characters", "contamination", "tokens", "histogram"))
"""Statistics with their own table or chart."""

MAX_FLAGGED_SHOWN = 20
"""Rows listed on the page; the JSON has more."""
LEAST_SHARE = 0.01
"""Share of rows from which an answer gets a line."""


def report_page(report: Mapping[str, Any], *, name: str) -> str:
    """Render `report` (see ``ft_assets.datasets.report.validation_report``) as one self-contained page."""
    title = f"{name}: {'valid' if report['valid'] else 'not valid'}"
    return document("report", title=title, name=name, **report_values(report))


def report_values(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the body of the page shows."""
    stats = report.get("stats") or {}
    graph = stats.get("histogram") or {}
    return {
        "report": report,
        "contamination": contamination_line(stats),
        "lengths": {unit: stats[unit] for unit in ("tokens", "characters") if (stats.get(unit) or {}).get("total")},
        "length_names": LENGTHS,
        "counts": dict(_flat({k: v for k, v in stats.items() if k not in SHOWN_APART})),
        "answers": [a for a in (stats.get("quality") or {}).get("top_answers", ()) if a["share"] >= LEAST_SHARE],
        "flagged_shown": MAX_FLAGGED_SHOWN,
        "histogram": Markup(histogram_svg(graph["counts"], graph["edges"], unit=graph["unit"])) if graph.get("counts") else "",
        "policies": report.get("policies") or {},
        "problems": problems_of(report),
        "first_rows": report.get("first_rows") or (),
    }


def _flat(stats: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Flatten nested statistics into dotted names and values."""
    found: list[tuple[str, Any]] = []
    for name, value in stats.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{name}.")
        elif value not in (None, "", []) and not (isinstance(value, list) and isinstance(value[0], Mapping)):
            found.append((f"{prefix}{name}", value))
    return found
