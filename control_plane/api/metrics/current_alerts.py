"""Which alerting rules hold now, read from the platform's own gauges: for operators' pages, without a Prometheus.

The rules are those that Prometheus gets (``deploy/observability/alerts.yaml``). A rule can be read if it compares a gauge of now with a
number, ``max by (pool) (ft_pool_nodes_sick) > 0``, or joins several such by ``and`` or ``or``. Others need the past, or other processes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry

from core.epoch_time import span_words

RULES = Path(__file__).parents[3] / "deploy" / "observability" / "alerts.yaml"
SEVERITIES = ("page", "ticket", "info")
"""The most urgent first."""
JOINED = re.compile(r"\s+(and|or)\s+")
COMPARISON = re.compile(r"(.+?)\s*(>|<|==)\s*([\d.]+(?:\s*\*\s*[\d.]+)*)")
AGGREGATION = re.compile(r"(max|min|sum)(?:\s+by\s+\(([\w, ]+)\))?\s*\((.+)\)")
ABSOLUTE = re.compile(r"abs\((.+)\)")
GAUGE = re.compile(r'(ft_\w+)(?:\{(\w+)="([^"]*)"\})?')
IN_SUMMARY = re.compile(r"\{\{\s*\$(?:labels\.(\w+)|value\s*\|\s*(\w+))\s*\}\}")
Labels = tuple[tuple[str, str], ...]
Vector = Mapping[Labels, float]
OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">": lambda value, limit: value > limit, "<": lambda value, limit: value < limit, "==": lambda value, limit: value == limit,
}  # fmt: skip
AGGREGATES: Mapping[str, Callable[[Sequence[float]], float]] = {"max": max, "min": min, "sum": sum}
WORDS: Mapping[str, Callable[[float], str]] = {
    "humanize": lambda value: f"{value:,.4g}", "humanizeDuration": span_words, "humanizePercentage": lambda value: f"{100 * value:.3g} %",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """An alert that holds."""

    name: str
    severity: str
    summary: str
    pending: str
    """How long it must hold until Prometheus fires it, such as ``5m``; empty: at once."""
    runbook: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Alerts:
    holding: Sequence[Alert]
    """The most urgent first."""
    unreadable: Sequence[str]
    """Names of rules that only Prometheus can evaluate."""


@dataclass(kw_only=True)
class CurrentAlerts:
    """The rules over the gauges of `registry`."""

    registry: CollectorRegistry
    rules_file: Path = field(default=RULES)

    @cached_property
    def _rules(self) -> Sequence[Mapping[str, Any]]:
        return [rule for group in yaml.safe_load(self.rules_file.read_text())["groups"] for rule in group["rules"]]

    def read(self) -> Alerts:
        """Evaluate every rule that can be."""
        gauges: dict[str, Vector] = defaultdict(dict)
        for family in self.registry.collect():
            for sample in family.samples:
                gauges[sample.name] = {**gauges[sample.name], tuple(sorted(sample.labels.items())): sample.value}
        found = [(rule, holds(rule["expr"], gauges)) for rule in self._rules]
        alerts = [_alert(rule, labels, value) for rule, vector in found if vector for labels, value in vector.items()]
        return Alerts(
            holding=sorted(alerts, key=lambda alert: SEVERITIES.index(alert.severity)),
            unreadable=[rule["alert"] for rule, vector in found if vector is None],
        )


def holds(expression: str, gauges: Mapping[str, Vector]) -> Vector | None:
    """Return the values for which the rule `expression` holds, by labels, empty if it does not; None if it cannot be read.

    An alternative that cannot be read counts as one that does not hold.
    """
    first, *rest = _parts(expression.strip())
    found = _compared(first, gauges)
    for operator, part in zip(rest[::2], rest[1::2], strict=True):
        other = _compared(part, gauges)
        if operator == "or":
            found = other if found is None else found or other or {}
        elif found is None or other is None:
            return None
        else:
            found = found if other else {}
    return found


def _parts(expression: str) -> Sequence[str]:
    """Return what ``and`` and ``or`` outside of parentheses join, with these words between."""
    found, begin = [], 0
    for match in JOINED.finditer(expression):
        before = expression[: match.start()]
        if before.count("(") == before.count(")"):
            found += [expression[begin : match.start()], match[1]]
            begin = match.end()
    return [*found, expression[begin:]]


def _compared(expression: str, gauges: Mapping[str, Vector]) -> Vector | None:
    if (match := COMPARISON.fullmatch(expression.strip())) is None or (vector := _value(match[1], gauges)) is None:
        return None
    limit = 1.0
    for factor in match[3].split("*"):
        limit *= float(factor)
    return {labels: value for labels, value in vector.items() if OPERATORS[match[2]](value, limit)}


def _value(expression: str, gauges: Mapping[str, Vector]) -> Vector | None:
    expression = expression.strip()
    if match := GAUGE.fullmatch(expression):
        wanted = (match[2], match[3])
        return {labels: value for labels, value in gauges.get(match[1], {}).items() if match[2] is None or wanted in labels}
    if match := ABSOLUTE.fullmatch(expression):
        inner = _value(match[1], gauges)
        return None if inner is None else {labels: abs(value) for labels, value in inner.items()}
    if (match := AGGREGATION.fullmatch(expression)) is None or (inner := _value(match[3], gauges)) is None:
        return None
    kept, grouped = {name.strip() for name in (match[2] or "").split(",")}, defaultdict[Labels, list[float]](list)
    for labels, value in inner.items():
        grouped[tuple(pair for pair in labels if pair[0] in kept)].append(value)
    return {labels: AGGREGATES[match[1]](values) for labels, values in grouped.items()}


def _alert(rule: Mapping[str, Any], labels: Labels, value: float) -> Alert:
    named = dict(labels)
    summary = IN_SUMMARY.sub(lambda m: named.get(m[1], "") if m[1] else WORDS[m[2]](value), rule["annotations"]["summary"])
    return Alert(
        name=rule["alert"], severity=rule["labels"]["severity"], summary=summary, pending=rule.get("for", ""),
        runbook=rule["annotations"]["runbook_url"],
    )  # fmt: skip
