"""The validation report as a page: for the API, for ``ft check --html``, for the console."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from control_plane.console.documents.charts import SMALL, columns
from control_plane.console.documents.differences import marked
from control_plane.console.jinja_environment import document
from control_plane.console.report_labels import KINDS, LANGUAGES, LENGTHS, PII_ACTIONS, POLICIES, STATISTICS, label
from engine.data import contamination, contamination_line, problems_of

SHOWN_APART = ("characters", "contamination", "tokens", "histogram", "personal_data", "quality.languages", "quality.top_answers")
"""Statistics with their own section."""
MAX_FLAGGED_SHOWN = 20
"""Rows listed on the page; the JSON has more."""
LEAST_SHARE = 0.01
"""Share of rows from which an answer gets a line."""


def report_page(report: Mapping[str, Any], *, name: str) -> str:
    """Render `report` (see ``engine.data.report.validation_report``) as one self-contained page."""
    title = f"{name}: {'valid' if report['valid'] else 'not valid'}"
    return document("report", title=title, name=name, **report_values(report))


def report_values(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the body of the page shows."""
    stats, policies, flagged = report.get("stats") or {}, report.get("policies") or {}, report.get("flagged") or ()
    quality, personal = stats.get("quality") or {}, stats.get("personal_data") or {}
    return {
        "report": report,
        "contamination": contamination(stats),
        "contamination_line": contamination_line(stats),
        "contaminated": [flag for flag in flagged if flag["code"] == "contaminated"],
        "personal": personal,
        "personal_kinds": [(label(KINDS, kind), rows) for kind, rows in _by_count(personal.get("kinds") or {})],
        "personal_action": PII_ACTIONS.get(policies.get("pii", ""), ""),
        "languages": [(label(LANGUAGES, code), share) for code, share in _by_count(quality.get("languages") or {})],
        "pairs": [(flag, *marked(*flag["texts"])) for flag in flagged if "texts" in flag],
        "duplicates": stats.get("duplicates") or {},
        "lengths": {unit: stats[unit] for unit in ("tokens", "characters") if (stats.get(unit) or {}).get("total")},
        "length_names": LENGTHS,
        "histograms": list(_histograms(stats)),
        "counts": [(label(STATISTICS, name), value) for name, value in _flat(stats)],
        "answers": [a for a in quality.get("top_answers", ()) if a["share"] >= LEAST_SHARE],
        "flagged": [flag for flag in flagged if flag["code"] != "contaminated" and "texts" not in flag],
        "flagged_shown": MAX_FLAGGED_SHOWN,
        "policies": [(label(POLICIES, name), value) for name, value in policies.items() if value is not None],
        "problems": problems_of(report),
        "first_rows": report.get("first_rows") or (),
    }


def _by_count(counts: Mapping[str, float]) -> Sequence[tuple[str, float]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _histograms(stats: Mapping[str, Any]) -> Iterator[tuple[str, Markup]]:
    """Yield a chart of the lengths in each unit; a report of an earlier version has one of them."""
    found = {"characters": (stats.get("characters") or {}).get("histogram")}
    if graph := stats.get("histogram"):
        found[graph["unit"]] = graph
    for unit in ("tokens", "characters"):
        graph = found.get(unit) or {}
        if graph.get("counts"):
            bars = [(f"{edge:,}", float(count)) for edge, count in zip(graph["edges"], graph["counts"], strict=False)]
            yield unit, columns(bars, title=f"Rows by length in {unit}", form="{:,.0f} rows", size=SMALL)


def _flat(stats: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested statistics under dotted names, without those that have a section, and without empty ones."""
    for name, value in stats.items():
        dotted = f"{prefix}{name}"
        if dotted in SHOWN_APART or value in (None, "", []):
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{dotted}.")
        else:
            yield dotted, value
