"""An evaluation as a page: for the API, for ``ft eval --html``, for the console."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from control_plane.console.documents.charts import curves, interval_bar
from control_plane.console.documents.differences import marked
from control_plane.console.jinja_environment import document
from core.storable_text import shown_answer
from engine.evals import SCORED_PREFIX

IN_NATS = frozenset({"perplexity", "preference_margin"})
"""Metrics whose intervals are not shares: each has its own scale."""
FILTERS = (("all", "all"), ("worse", "worse"), ("better", "better"), ("changed", "another answer, same score"), ("same", "the same"))
MODES = {
    "experiment": "Experiment: a failed rule blocks its promotion", "monitor": "Monitored: a failed rule does not block",
    "off": "Gate off: a failed rule does not block",
}  # fmt: skip
KINDS = (
    ("task", "The task"),
    ("suite", "Your scored suites"),
    ("capability", "Capability"),
    ("safety", "Safety"),
    ("golden", "Golden prompts"),
)
MAX_SAMPLES = 200


def evaluation_page(
    evaluation: Mapping[str, Any], *, curve: Sequence[Mapping[str, Any]] = (), samples: Sequence[Mapping[str, Any]] | None = None
) -> str:
    """Render `evaluation` (as the API returns it) as one self-contained page.

    `samples`: rows of the evaluation's samples; None: those in the report are shown.
    """
    title = f"{evaluation['job_id']}: {evaluation['verdict']['outcome']}"
    return document("evaluation", title=title, **evaluation_values(evaluation, curve=curve, samples=samples))


def evaluation_values(
    evaluation: Mapping[str, Any], *, curve: Sequence[Mapping[str, Any]], samples: Sequence[Mapping[str, Any]] | None
) -> Mapping[str, Any]:
    """Return what the body of the page shows."""
    report, verdict = evaluation["report"], evaluation["verdict"]
    order = [change for change, _ in FILTERS]
    given = (report.get("samples") or ()) if samples is None else samples
    shown = sorted(given, key=lambda s: order.index(s.get("change", "same")))[:MAX_SAMPLES]
    return {
        "e": evaluation,
        "report": report,
        "verdict": verdict,
        "gate_mode": MODES.get(verdict.get("mode"), ""),
        "failed": [f for f in verdict["findings"] if f["blocking"] and not f["passed"]],
        "warned": [f for f in verdict["findings"] if f["code"] in verdict.get("warnings", ())],
        "tables": list(_tables(report)),
        "previous": any(s.get("previous") is not None for s in report["scores"]),
        "curves": [one for one in curves(curve) if one.title in ("Loss", "Loss by file")],
        "samples": [_side_by_side(sample) for sample in shown],
        "counts": {change: sum(s.get("change", "same") == change for s in shown) for change, _ in FILTERS} | {"all": len(shown)},
        "filters": FILTERS,
        "next_run": " ".join(f"--hp {name}={value}" for name, value in (evaluation.get("next_run") or {}).items()),
        "judge": report.get("judge"),
    }


def _side_by_side(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an item with the differences between the answers of base and candidate marked."""
    texts = {name: sample.get(name) or "" for name in ("base", "adapter")}
    sides: dict[str, Any] = dict(zip(texts, marked(*texts.values()), strict=True))
    if sample.get("prompt") or any(texts.values()):  # an item of likelihoods has no answers
        sides |= {name: shown_answer(text) for name, text in texts.items() if not text.strip()}
        sides |= {} if sample.get("previous") is None else {"previous": shown_answer(sample["previous"])}
    return {
        "change": "same",
        "suite": "holdout",
        "judge": None,
        "previous": None,
        "scores": None,
        **sample,
        **sides,
    }


def _tables(report: Mapping[str, Any]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Scores by subject, each with its interval as a chart; the gate's metric of a capability suite comes first."""
    for kind, title in KINDS:
        scores = [s for s in report["scores"] if _kind(s["suite"]) == kind]
        ends = [abs(s[end]) for s in scores for end in ("ci_low", "ci_high") if s["metric"] not in IN_NATS]
        reach = max([x for x in ends if math.isfinite(x)], default=1.0)
        if scores:
            yield title, [_row(s, reach, report) for s in scores]


def _kind(suite: str) -> str:
    first = suite.partition("/")[0]
    return first if first in ("suite", "capability", "safety", "golden") else "task"


def _row(score: Mapping[str, Any], reach: float, report: Mapping[str, Any]) -> Mapping[str, Any]:
    own = max(abs(score["ci_low"]), abs(score["ci_high"])) if score["metric"] in IN_NATS else reach
    lower = score["metric"] in ("perplexity", "over_refused")
    middle = (score["ci_low"] + score["ci_high"]) / 2 if score["metric"] in IN_NATS else _gain(score, lower)
    leading = {run["id"]: run.get("metric") for run in report.get("suites", ())}
    minor = score["suite"] in leading and leading[score["suite"]] not in (None, score["metric"])
    bar = interval_bar(score["ci_low"], score["ci_high"], middle, reach=own)
    since = None
    if score.get("previous_ci_low") is not None:
        since = interval_bar(
            score["previous_ci_low"], score["previous_ci_high"], (score["previous_ci_low"] + score["previous_ci_high"]) / 2, reach=own
        )
    share = (not lower and score["metric"] not in IN_NATS) or score["metric"] == "over_refused"
    return {
        **score,
        "bar": Markup(bar),
        "since": Markup(since) if since else "",
        "share": share,
        "lower": lower,
        "minor": minor,
        "name": "mean over suites"
        if score["suite"] == "capability"
        else score["suite"].removeprefix("capability/").removeprefix(SCORED_PREFIX),
    }


def _gain(score: Mapping[str, Any], lower: bool) -> float:
    gain = float(score["adapter"]) - float(score["base"])
    return -gain if lower else gain
