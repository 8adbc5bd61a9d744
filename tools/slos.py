"""Writes rules and a dashboard from the objectives in ``deploy/observability/slos.yaml``: ``python -m tools.slos [DIRECTORY]``.

Recording rules: ``slo:events`` (events in a window) and ``slo:burn_rate`` (share of bad events over the share that the objective allows:
at 1 the budget lasts exactly its period), both by ``slo`` and ``window``. Alerts compare burn rates over a long window, which makes them
significant, and a short one, which ends them soon after the cause ends.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tools.lock import ROOT

DIRECTORY = ROOT / "deploy" / "observability"
RULES, DASHBOARD = "slo-rules.yaml", "dashboards/slos.json"
MINUTES = {"m": 1, "h": 60, "d": 24 * 60}
LONG_MINUTES = 24 * 60
"""Windows from this length on are evaluated every 2 minutes, for they read many samples; a sample is seen for 5 minutes."""
HEADER = "# Made from slos.yaml by `make slos`; do not edit. docs/operations/runbook has a page for each alert.\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    burn: float
    """Factor over the rate at which the budget lasts exactly its period."""
    long: str
    short: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """A service level objective; the fields are described in the file."""

    name: str
    alert: str
    title: str
    objective: float
    bad: str
    all: str
    at_least: int
    fast: Sequence[Pair]
    slow: Sequence[Pair]
    by_platform: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not 0 < self.objective < 1:
            raise ValueError(f"{self.name}: objective {self.objective} is not between 0 and 1")
        for pair in (*self.fast, *self.slow):
            if minutes(pair.short) >= minutes(pair.long):
                raise ValueError(f"{self.name}: short window {pair.short} is not shorter than {pair.long}")
            if pair.burn * (1 - self.objective) >= 1:
                raise ValueError(f"{self.name}: burn {pair.burn} needs more than every event to be bad; lower it")

    @property
    def windows(self) -> list[str]:
        """Return the windows of all alerts, the shortest first."""
        return sorted({w for pair in (*self.fast, *self.slow) for w in (pair.long, pair.short)}, key=minutes)


def minutes(window: str) -> int:
    return int(window[:-1]) * MINUTES[window[-1]]


def read(file: Path) -> tuple[str, list[Slo]]:
    """Return the period and the objectives of `file`."""
    body = yaml.safe_load(file.read_text())
    pairs = [{**each, **{speed: [Pair(**pair) for pair in each[speed]] for speed in ("fast", "slow")}} for each in body["slos"]]
    return body["period"], [Slo(**each) for each in pairs]


def rules(period: str, slos: Sequence[Slo]) -> Mapping[str, Any]:
    """Return the rule file: recording rules by how often they are evaluated, then alerts."""
    recorded = [(window, rule) for slo in slos for window in (*slo.windows, period) for rule in _records(slo, window)]
    short, long = ([rule for w, rule in recorded if (minutes(w) >= LONG_MINUTES) is is_long] for is_long in (False, True))
    return {
        "groups": [
            {"name": "ft-slo-records", "interval": "1m", "rules": short},
            {"name": "ft-slo-long-records", "interval": "2m", "rules": long},
            {"name": "ft-slo-alerts", "rules": [alert for slo in slos for alert in _alerts(slo)]},
        ]
    }


def _records(slo: Slo, window: str) -> Iterator[Mapping[str, Any]]:
    labels, allowed = {"slo": slo.name, "window": window}, f"{1 - slo.objective:.6g}"
    bad, events = (_count(series, window, slo.by_platform) for series in (slo.bad, slo.all))
    yield {"record": "slo:events", "labels": dict(labels), "expr": events}
    yield {"record": "slo:burn_rate", "labels": labels, "expr": f"({bad} or vector(0)) / ({events} > 0) / {allowed}"}


def _count(series: str, window: str, by_platform: Sequence[str]) -> str:
    """Return the expression of how much counters grew; replicas come and go while the platform's counts go on."""
    if not by_platform:
        return f"sum(increase({series}[{window}]))"
    now, before = (f"sum(max by ({', '.join(by_platform)}) ({series}{offset}))" for offset in ("", f" offset {window}"))
    return f"({now} - ({before} or 0 * {now}))"  # a count that was not there yet was 0


def _alerts(slo: Slo) -> Iterator[Mapping[str, Any]]:
    for speed, severity, pairs in (("Fast", "page", slo.fast), ("Slow", "ticket", slo.slow)):
        name = f"{slo.alert}{speed}"
        yield {
            "alert": name,
            "expr": f"max by (slo) ({' or ignoring(window) '.join(_burning(slo, pair) for pair in pairs)})",
            "for": "2m",
            "labels": {"severity": severity},
            "annotations": {
                "summary": f"{slo.title}: the error budget is spent {{{{ $value | humanize }}}} times as fast as it may be",
                "runbook_url": f"docs/operations/runbook/{name}.md",
            },
        }


def _burning(slo: Slo, pair: Pair) -> str:
    long, short = (f'slo:burn_rate{{slo="{slo.name}",window="{window}"}}' for window in (pair.long, pair.short))
    events = f'slo:events{{slo="{slo.name}",window="{pair.long}"}}'
    return f"({long} > {pair.burn} and ignoring(window) {short} > {pair.burn} and ignoring(window) {events} >= {slo.at_least})"


def dashboard(period: str, slos: Sequence[Slo]) -> Mapping[str, Any]:
    """Return Grafana's dashboard: a row for each objective with its budget, its rate, and what burned it."""
    panels: list[Mapping[str, Any]] = []
    for number, slo in enumerate(slos):
        top, first = 9 * number, 5 * number + 1
        rates = f'max by (window) (slo:burn_rate{{slo="{slo.name}"}})'
        one, left = f'slo="{slo.name}"', [(f'1 - slo:burn_rate{{slo="{slo.name}",window="{period}"}}', "left")]
        panels += [
            {"id": first, "type": "row", "title": f"{slo.title}: {100 * slo.objective:g} %", "collapsed": False,
             "gridPos": {"h": 1, "w": 24, "x": 0, "y": top}, "panels": []},
            _panel(first + 1, "stat", f"Budget left of {period}", (0, top + 1, 4, 4), left, unit="percentunit", low_is_bad=True),
            _panel(first + 2, "stat", f"Events in {period}", (0, top + 5, 4, 4), [(f'slo:events{{{one},window="{period}"}}', "events")]),
            _panel(first + 3, "timeseries", "Budget left", (4, top + 1, 10, 8), left, unit="percentunit"),
            _panel(first + 4, "timeseries", "Burn rate by window", (14, top + 1, 10, 8), [(rates, "{{window}}")]),
        ]  # fmt: skip
    return {
        "title": "ft-platform: objectives", "uid": "ft-slos", "schemaVersion": 39, "version": 1, "editable": True, "timezone": "utc",
        "refresh": "1m", "time": {"from": "now-7d", "to": "now"}, "tags": ["ft-platform"],
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}]},
        "annotations": {"list": []}, "panels": panels,
    }  # fmt: skip


def _panel(
    id_: int, kind: str, title: str, at: tuple[int, int, int, int], queries: Sequence[tuple[str, str]], *, unit: str = "short",
    low_is_bad: bool = False,
) -> Mapping[str, Any]:  # fmt: skip
    source = {"type": "prometheus", "uid": "${datasource}"}
    steps = [{"color": "red", "value": None}, {"color": "orange", "value": 0}, {"color": "green", "value": 0.5}]
    defaults = {"unit": unit, **({"thresholds": {"mode": "absolute", "steps": steps}} if low_is_bad else {})}
    return {
        "id": id_, "type": kind, "title": title, "datasource": source, "gridPos": dict(zip("xywh", at, strict=True)),
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _OPTIONS[kind],
        "targets": [
            {"refId": chr(65 + number), "expr": query, "legendFormat": legend, "datasource": source}
            for number, (query, legend) in enumerate(queries)
        ],
    }  # fmt: skip


_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "stat": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "background"},
    "timeseries": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
}


def write(directory: Path) -> None:
    """Write both files below `directory` from its ``slos.yaml``."""
    period, slos = read(DIRECTORY / "slos.yaml")
    (directory / "dashboards").mkdir(exist_ok=True)
    body = yaml.safe_dump(rules(period, slos), sort_keys=False, width=10_000)
    (directory / RULES).write_text(HEADER + body)
    (directory / DASHBOARD).write_text(json.dumps(dashboard(period, slos), indent=1) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else DIRECTORY)
